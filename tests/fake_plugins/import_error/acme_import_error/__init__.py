"""A plugin that needs a module nobody has."""

import acme_module_that_is_not_there  # noqa: F401  # the failure is what this plugin is for
