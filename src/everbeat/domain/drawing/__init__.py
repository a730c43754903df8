"""Drawings of workflows as text, SVG and Mermaid. Pure code without I/O."""
