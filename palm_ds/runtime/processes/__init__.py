"""Processes: how they are launched, meet, notice one another and end."""
