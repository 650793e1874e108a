"""Writes the rules to where prometheus.yml reads them, and as Kubernetes takes them."""

from kvscope.dashboards.prometheus.rules import GENERATED_RULES, KUBERNETES, as_kubernetes, as_yaml

for path, text in ((GENERATED_RULES, as_yaml()), (KUBERNETES, as_kubernetes())):
    path.write_text(text, encoding="utf-8")
    print(f"{path.name} written")
