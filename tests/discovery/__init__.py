"""Discovery of engines: files, HTTP servers, DNS and the Kubernetes API."""
