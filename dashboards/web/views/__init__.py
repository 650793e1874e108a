"""The views, one in each module (dashboards/web/view_registry.py lists them)."""
