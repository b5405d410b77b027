"""Formulas of losses and heads in plain torch, which only tests need."""
