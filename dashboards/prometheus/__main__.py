"""Writes the rules to where prometheus.yml reads them."""

from dashboards.prometheus.rules import GENERATED, as_yaml

GENERATED.write_text(as_yaml(), encoding="utf-8")
print(f"{GENERATED.name} written")
