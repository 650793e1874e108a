"""Writes the dashboard to where Grafana's provisioning reads it."""

from dashboards.grafana.dashboard import GENERATED, as_json

GENERATED.write_text(as_json(), encoding="utf-8")
print(f"{GENERATED.name} written")
