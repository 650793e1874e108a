"""The Grafana dashboard as code: `python -m dashboards.grafana` writes generated/kvscope.json."""
