"""Hooks that `evener run` and `evener launch` install in the process of the user's script.

They let PyTorch's processes rendezvous without a port. Under `evener launch`, they check that the
script reads its plan. Under `evener run`, they wrap functions of libraries. The code that a hook
runs is imported when the hook is first called.
"""

from __future__ import annotations

import atexit
import os
import sys
from functools import partial
from importlib import import_module
from operator import attrgetter
from typing import Any

from ..errors import EvenerError
from ..plan.use import PLAN_USED
from ..system.threads import wait_until_asleep
from ..training.ending import end_process, install_interrupt_watchdog
from ..training.launched import PROGRAM, launched_device

# collectives that evener.program.exchanges handles; those missing from this version of PyTorch are
# skipped
_EXCHANGES = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor"),
    *("all_gather_single", "_all_gather_base", "gather", "reduce_scatter", "reduce_scatter_tensor"),
    *("reduce_scatter_single", "all_to_all", "all_to_all_single"),
    *("all_gather_object", "gather_object", "broadcast_object_list"),
)
_EXCHANGED = "program:PROGRAM.run_collective"
_FUNCTIONAL = (
    *("all_reduce", "broadcast", "all_gather_tensor", "all_gather_tensor_autograd"),
    *("all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all_single"),
)
_FIT_LOOP = (
    ("_FitLoop.run", "strategies:run"),
    ("_FitLoop.on_advance_start", "strategies:begin_epoch"),
)
# hooks of any process whose program may turn out to train unchanged: its steps are timed
_TIMED = (
    ("utils.data.DataLoader.__iter__", "unchanged:begin_loop"),
    ("autograd.backward", "unchanged:UNCHANGED.run_backward"),
    ("save", "unchanged:UNCHANGED.save"),
)
# a library's module -> pairs of a function and its wrapper, as file:function
_HOOKS = {
    "torch": (
        *_TIMED,
        ("nn.parallel.DistributedDataParallel.__init__", "program:PROGRAM.make_model"),
        ("utils.data.DataLoader.__iter__", "loops:begin_loop"),
        ("nn.utils.clip_grad_norm_", "program:PROGRAM.clip"),
        ("nn.utils.clip_grad_value_", "program:PROGRAM.clip"),
        *((f"distributed.{name}", _EXCHANGED) for name in _EXCHANGES),
        ("autograd.backward", "program:PROGRAM.run_backward"),
        ("distributed.init_process_group", "group:begin"),
        ("distributed.destroy_process_group", "install:leave_group"),
    ),
    "torch.multiprocessing.spawn": (("start_processes", "group:begin_processes"),),
    "torch.distributed._functional_collectives": tuple((name, _EXCHANGED) for name in _FUNCTIONAL),
    "torch.distributed.fsdp": (
        ("fully_shard", "program:PROGRAM.shard_model"),
        ("FullyShardedDataParallel.__init__", "program:PROGRAM.make_model"),
    ),
    "deepspeed.runtime.engine": (("DeepSpeedEngine.__init__", "program:PROGRAM.make_model"),),
    "torch.distributed._composable.fsdp": (("fully_shard", "program:PROGRAM.shard_model"),),
    "accelerate.data_loader": (
        ("DataLoaderShard.__iter__", "loops:begin_wrapping_loader"),
        ("DataLoaderDispatcher.__iter__", "loops:begin_dispatcher"),
    ),
    "accelerate.accelerator": (("Accelerator.gather", "loops:gather"),),
    "timm.data.loader": (("PrefetchLoader.__iter__", "loops:begin_wrapping_loader"),),
    "transformers.trainer": (("Trainer.train", "trainers:train"),),
    "fastai.torch_core": (("maybe_gather", "learners:gather"),),
    "fastai.learner": (("Learner.fit", "learners:fit"),),
    "lightning.pytorch.loops.fit_loop": _FIT_LOOP,
    "pytorch_lightning.loops.fit_loop": _FIT_LOOP,
}
# hooks of a single process that evener run started, without shares: it may start processes, and a
# Trainer can recover from running out of memory
_ALONE = {
    "torch": (*_TIMED, ("distributed.init_process_group", "group:begin")),
    "torch.multiprocessing.spawn": _HOOKS["torch.multiprocessing.spawn"],
    "transformers.trainer": _HOOKS["transformers.trainer"],
}
_GLOO = "pt_gloo_runloop"  # the name of gloo's worker threads
_LIBRARIES = {"keras", *(name.partition(".")[0] for name in _HOOKS)}


def install() -> None:
    """Install the hooks if evener started this process.

    If a hooked library is already imported, they are registered at once, and otherwise when the
    first such library is imported.
    """
    if not (launched_device() or os.environ.get(PLAN_USED)):
        return
    if _LIBRARIES & sys.modules.keys():
        _register()
    else:
        sys.meta_path.insert(0, _HookFinder())


class _HookFinder:
    """Import finder that registers the hooks when a hooked library is first imported."""

    # Registering waits for the first such import, because importing wrapt takes a while. The finder
    # then removes itself, and the other finders find the module.

    def find_spec(self, name: str, *_: Any) -> Any:
        if name not in _LIBRARIES:
            return None
        from importlib.util import find_spec

        sys.meta_path.remove(self)
        _register()
        return find_spec(name)


def _register() -> None:
    from wrapt import register_post_import_hook

    if launched_device():
        register_post_import_hook(_replace_rendezvous, "torch")
        register_post_import_hook(_listen_to_ctrl_c, "torch")
    if os.environ.get(PLAN_USED):
        register_post_import_hook(_count_steps, "torch")
        register_post_import_hook(_begin_fits, "keras")
    if not os.environ.get(PROGRAM):
        return
    sys.excepthook = partial(print_own_error, sys.excepthook)
    atexit.register(wait_until_asleep, _GLOO)  # the handler that was registered first runs last
    alone = os.environ.get("WORLD_SIZE") == "1"
    hooks = _ALONE if alone else _HOOKS
    for module in hooks:
        register_post_import_hook(partial(_wrap, hooks), module)
    register_post_import_hook(_time_updates, "torch")
    register_post_import_hook(_leave_uncompiled, "torch._dynamo.trace_rules")
    if not alone:
        register_post_import_hook(_watch_steps, "torch")
        register_post_import_hook(_watch_loader_classes, "torch")


def _replace_rendezvous(torch: Any) -> None:
    if torch.distributed.is_available():
        import_module("evener.torch.stores").replace_rendezvous()


def _listen_to_ctrl_c(_: Any) -> None:
    install_interrupt_watchdog()


def _count_steps(_: Any) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(_import_later("plan_check:count_step"))


def _begin_fits(keras: Any) -> None:
    from wrapt import wrap_function_wrapper

    wrap_function_wrapper(keras, "Model.fit", _import_later("plan_check:begin_fit"))


def _wrap(hooks: Any, module: Any) -> None:
    from wrapt import wrap_object

    from .wrapped_function import WrappedFunction

    for name, target in hooks[module.__name__]:
        if target == _EXCHANGED and not _has(module, name):
            continue
        path = f"{module.__name__}:{name}"
        wrap_object(module, name, WrappedFunction, (_import_later(target), path))


def _watch_steps(_: Any) -> None:
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    register_optimizer_step_pre_hook(_import_later("program:PROGRAM.begin_update"))
    register_optimizer_step_post_hook(_import_later("program:PROGRAM.note_update"))


def _time_updates(_: Any) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(_import_later("unchanged:UNCHANGED.end_update"))


def _leave_uncompiled(_: Any) -> None:
    import_module("evener.torch.hooks").leave_hooks_uncompiled()


def _watch_loader_classes(torch: Any) -> None:
    """Hook `__iter__` of each subclass of `DataLoader` that defines its own."""
    from wrapt import wrap_function_wrapper

    parent = torch.utils.data.DataLoader

    def make_class(cls: Any, /, **given: Any) -> None:
        super(parent, cls).__init_subclass__(**given)
        if "__iter__" in vars(cls):
            wrap_function_wrapper(cls, "__iter__", _import_later("loops:begin_loader_subclass"))

    parent.__init_subclass__ = classmethod(make_class)


def print_own_error(
    before: Any, kind: type[BaseException], error: BaseException, trace: Any
) -> None:
    """`sys.excepthook` that prints evener's own errors without a traceback and ends the process.

    Other errors are passed to `before`, the previous hook.
    """
    if not isinstance(error, EvenerError):
        before(kind, error, trace)
        return
    # PyTorch may have replaced sys.stderr while it waits for a traceback
    stderr = sys.__stderr__ or sys.stderr
    stderr.write(f"\r\nevener: {error}\n")
    stderr.flush()
    atexit._run_exitfuncs()
    end_process(error.exit_code)  # Python itself would exit with 1


def leave_group(wrapped: Any, _: Any, arguments: Any, keywords: Any) -> Any:
    """Hook of `destroy_process_group` that first waits until gloo's threads are idle."""
    # Work items hold Python objects. A thread that releases them during the interpreter's shutdown
    # aborts the process; while its group is destroyed, it blocks forever.
    wait_until_asleep(_GLOO)
    return wrapped(*arguments, **keywords)


def _has(module: Any, name: str) -> bool:
    try:
        attrgetter(name)(module)
    except AttributeError:
        return False
    return True


def _import_later(target: str) -> Any:
    """Return a function that imports `target` on its first call, and then calls it.

    `target` has the form "group:begin": a module of this package, and a function in it.
    """
    name, _, function = target.partition(":")
    find = attrgetter(function)
    module = None

    def call(*given: Any) -> Any:
        nonlocal module
        if module is None:
            module = _import_uncompiled(f"evener.program.{name}")
        return find(module)(*given)

    return call


def _import_uncompiled(name: str) -> Any:
    """Import a module in such a way that torch.compile doesn't trace the import."""
    if "torch._dynamo.eval_frame" not in sys.modules:
        return import_module(name)
    # a compiled function of the program may import it
    return sys.modules["torch"].compiler.disable(import_module)(name)
