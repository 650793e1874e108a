"""Faults and soaks against real processes: engines that publish, `monitor serve` and a receiver of alerts."""
