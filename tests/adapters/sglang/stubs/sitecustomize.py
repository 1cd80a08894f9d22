"""Runs in every process of a test server: torchvision registers GPU operators that a CPU build of torch lacks."""

import sys
import types

sys.modules.setdefault("torchvision._meta_registrations", types.ModuleType("torchvision._meta_registrations"))
