"""The processes that stay: `monitor serve` and `monitor agent`, and the hub over many agents.

settings_table.py, settings_file.py   every setting, and the value in force: flag, variable, file or default
service_config.py   the configuration of a service that follows from them
service.py          the parts of a service, wired; loop_watchdog.py watches that each of them works
source_set.py       the sources, added and removed while the service runs; source_reader.py reads one on its thread
discoveries.py      the targets that discovery finds
resumption.py       takes engines up where the service before this one left them
deliveries.py       hands findings to the log, alerts and OpenTelemetry
memory_budget.py    keeps the process within its memory; allocators.py: what is freed is returned
web_server.py       `monitor serve` as a process: HTTP, log, reloads, the end
http_api.py         the HTTP app: questions (query_routes.py), alerts, /metrics, behind the guard (guard.py)
sql_question.py     SQL that a hub asks of this agent
hub_server.py       `monitor hub` as a process: fleet_query.py answers for all engines, hub_alerts.py sends their alerts
                    once, hub_findings.py and hub_metrics.py are about the hub itself
"""
