"""Domain logic of tasks: states, policies, retries, outcomes, contexts and durable steps. The package performs no I/O."""
