"""The connector of the tests, as `--kv-transfer-config` has it."""

CONNECTOR = {
    "kv_connector": "KeepingConnector",
    "kv_connector_module_path": "tests.probes.keeping_connector",
    "kv_role": "kv_both",
}
