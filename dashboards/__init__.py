"""User interfaces: the web app, and dashboards, rules and routes as code."""
