"""Declares nothing."""
