"""Writes the dashboards to where Grafana's provisioning reads them."""

from kvscope.dashboards.grafana.pages import GENERATED_PAGES, PAGES, as_json

for name in PAGES:
    (GENERATED_PAGES / f"{name}.json").write_text(as_json(name), encoding="utf-8")
    print(f"{name}.json written")
