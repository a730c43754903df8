"""The integration with Sentry: `sentry_sdk.init(integrations=[EverbeatIntegration()])`. It needs the extra `sentry`."""

try:
    import sentry_sdk as _  # noqa: F401 - only to see whether it is installed
except ModuleNotFoundError:
    from everbeat.errors import SentryNotInstalled as _NotInstalled

    raise _NotInstalled from None

from everbeat.sentry.integration import EverbeatIntegration as EverbeatIntegration
