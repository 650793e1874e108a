"""Writes the rules to where prometheus.yml and the Helm chart read them, and as Kubernetes takes them."""

from .rules import GENERATED_RULES, KUBERNETES, RULES_OF_CHART, as_kubernetes, as_yaml

for path, text in ((GENERATED_RULES, as_yaml()), (RULES_OF_CHART, as_yaml()), (KUBERNETES, as_kubernetes())):
    path.write_text(text, encoding="utf-8")
    print(f"{path.name} written")
