"""Tests of pyro_structvi; what several of them share lies here beside conftest.py."""
