"""The views, one in each module; dashboards/web/table.py lists them."""
