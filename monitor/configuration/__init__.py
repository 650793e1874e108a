"""The settings of `monitor serve` and `monitor agent`: their table, the configuration file, and what is in force.

value_types.py     texts that stand for sizes, times and ports
settings_table.py  every setting: its key, its flag, its variable, its default
settings_file.py   reads the file, and reports each problem with its line
effective.py       which of flag, variable, file and default is in force
service_config.py  makes the service's configuration of it, and finds what cannot be run
settings_text.py   prints what is in force
running.py         runs the service with it
"""
