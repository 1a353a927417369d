# PyPI's torchvision wheel is a CUDA build; beside a CPU torch its _C extension does not load and
# `import torchvision` dies with "operator torchvision::nms does not exist".  Declaring the two op
# schemas first lets the pure-python part (all that sglang needs) import.
import importlib.abc
import importlib.machinery
import sys


class _TVFix(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            lib = torch.library.Library("torchvision", "DEF")
            for op in ("nms", "qnms"):
                lib.define(op + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            sys._tvfix_lib = lib
        return None


sys.meta_path.insert(0, _TVFix())
