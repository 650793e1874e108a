"""What people look at: the web app, and dashboards, rules and routes as code."""
