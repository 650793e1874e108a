"""Finds the engines to read: target files, HTTP servers, DNS names, the Kubernetes API.

discovery_config.py   what a configuration file asks for
target_groups.py      Prometheus's target groups, and how labels name what to read of a target
file_sd.py, http_sd.py, dns_names.py, kubernetes_pods.py   one finder each
"""
