"""The foundation of every everbeat process: clocks, the service loop, child processes, channels and events."""
