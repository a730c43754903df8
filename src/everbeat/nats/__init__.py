"""Hints over NATS JetStream: the link, the stream, consumers, and the relay of the message outbox. Only the wiring imports this package."""
