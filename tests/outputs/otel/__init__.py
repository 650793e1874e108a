"""What is sent by OpenTelemetry, to a real receiver over HTTP and over gRPC."""
