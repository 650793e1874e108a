"""Makes a hub's configuration of the settings in force."""

from __future__ import annotations

from kvscope.monitor.alerting.alerting import AlertsConfig
from kvscope.monitor.bus.bus_config import bus_config
from kvscope.monitor.configuration.effective import Effective
from kvscope.monitor.configuration.service_config import bad_receivers
from kvscope.monitor.configuration.settings_table import HUB_KEYS
from kvscope.monitor.hub.hub_server import HubConfig


def hub_config(effective: Effective) -> HubConfig:
    """Return the configuration. Raises BadConfiguration."""
    problems = [
        effective.problem(key, "this is of `monitor agent`: a hub reads no engine and keeps nothing. Leave it out")
        for key, layer in effective.layers.items()
        if layer == "file" and key not in HUB_KEYS
    ]
    if not effective["nats"]:
        problems.append(effective.problem("nats", "a hub reads what agents publish: name a NATS server"))
    problems += [effective.problem("alert", message) for message in bad_receivers(effective)]
    effective.refuse(problems)
    try:
        bus = bus_config(effective.__getitem__)
    except ValueError as error:
        effective.refuse([effective.problem("nats", str(error))])
        raise
    return HubConfig(
        bus=bus,
        host=effective["host"],
        port=effective["port"],
        token=effective["token"],
        alerts=AlertsConfig(
            receivers=effective["alert"],
            secret=effective["webhook_secret"],
            allow_private=effective["alert_private"],
            repeat_s=float(effective["alert_repeat"]),
            least_verdict=effective["alert_verdict"],
        ),
    )
