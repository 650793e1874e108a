"""Notifications: transitions of findings sent to alert receivers, with outbox, silences and reminders.

message.py         which transitions become messages, what a message contains, silences, and the JSON of the API
receivers.py       how each kind of receiver is addressed: webhook, Alertmanager, Slack, PagerDuty, plug-ins
alert_store.py     the database: messages to send, messages sent, open alerts, silences
outbox.py          which messages a transition or the clock causes
alerting.py        sends them, with a thread for each receiver: all of it as the service uses it
"""
