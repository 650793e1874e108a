"""Writes the dashboards to where Grafana's provisioning and the Helm chart read them."""

from .pages import GENERATED_PAGES, PAGES, PAGES_OF_CHART, as_json

for name in PAGES:
    for folder in (GENERATED_PAGES, PAGES_OF_CHART):
        (folder / f"{name}.json").write_text(as_json(name), encoding="utf-8")
    print(f"{name}.json written")
