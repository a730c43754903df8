"""Support for connections that users supply. They are recognized without importing their libraries."""
