"""Adapters: which weights an adapted model trains, and the files they are kept in."""
