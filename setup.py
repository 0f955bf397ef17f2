"""The build. What is installed stands in pyproject.toml; nothing is compiled."""

from setuptools import setup

setup()
