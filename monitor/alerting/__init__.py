"""Notifications: transitions of findings sent to alert receivers, with outbox, silences and reminders.

message.py        the message for one transition, whatever its receiver
receivers/        how each kind of receiver is addressed: webhook, Alertmanager, Slack, PagerDuty
silences.py       findings that send no notification, and until when
outbox.py         on disk: messages to send, messages sent, open alerts
flapping.py       when to stop notifying of an alert that fires and resolves repeatedly
delivery.py       a thread for each receiver, which retries until delivery
addresses.py      which addresses may be notified
alerting.py       all of these together, for the service
alert_schema.py   the API's JSON
alerts_client.py  the same over HTTP: `monitor alerts`
alerts_table.py   shown at a terminal
"""
