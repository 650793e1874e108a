"""Formats and sends messages for each kind of receiver.

receiver.py       what all of them are
parse.py          from an --alert URL to one of them
plugin_receiver.py  receivers of other distributions, contained
webhook.py        JSON, signed by the Standard Webhooks specification
alertmanager.py   Alertmanager's v2 API
slack.py          a Slack incoming webhook
pagerduty.py      PagerDuty's Events API v2
"""
