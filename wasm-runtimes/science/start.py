

def _start(sources):
    """Loads the boot modules, lets them prepare the interpreter, and gives `_reactor.turn` its new body."""
    import asyncio.events
    import sys
    import types

    import _reactor

    # What our event loop is made of; CPython 3.14 made it private.
    asyncio.events.BaseDefaultEventLoopPolicy = asyncio.events._BaseDefaultEventLoopPolicy

    for name, text in sources.items():
        module = sys.modules[name] = types.ModuleType(name)
        exec(compile(text, f"<{name}>", "exec", dont_inherit=True), module.__dict__)
    science = sys.modules["_wardian_science"]
    science.warm_up()
    # The C code that calls it holds on to this function, so it is its code that changes.
    _reactor._wardian_turn = science.turn
    _reactor.turn.__code__ = (lambda source, environ: _wardian_turn(source)).__code__
    for name in sources:
        del sys.modules[name]
    science.rest()
