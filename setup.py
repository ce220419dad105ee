"""Everything about the package stands in pyproject.toml; this file is for tools that ask for it."""

from setuptools import setup

setup()
