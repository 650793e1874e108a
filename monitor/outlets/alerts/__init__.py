"""Alerts: the life that monitor.findings keeps, told to where people are paged and write to each other.

message.py      what is told of one transition, whoever it goes to
receivers/      how each kind of receiver wants to be told: webhook, Alertmanager, Slack, PagerDuty
silences.py     what somebody does not want to be told of, and until when
outbox.py       on disk: what is to be told, what was told, and which alerts are open
flapping.py     when an alert that comes and goes is told of no more
sender.py       a thread for each receiver: tries until it is told
addresses.py    which addresses may be sent to
alerts.py       all of these together, as the service has them
views.py        what the API says of them
client.py       the same asked over HTTP: `monitor alerts`
table.py        shown at a terminal
page.py         shown in a browser, with buttons
"""
