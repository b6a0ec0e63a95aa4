// Stands in for a device: runs a kernel's threads as fibers, one thread block after the other.
//
// It is strict where a device would do as it likes: barriers must be reached by all threads of a block, shuffles by all
// lanes of a warp, arguments must have the types that the launch says, and memory around each buffer is watched. Shared
// memory that a launch asks for holds NaN at first.
//
// Standard input has the buffers and the launches (see mod.rs), standard output gets the buffers back.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <type_traits>
#include <vector>
#include <setjmp.h>
#include <ucontext.h>

#define __global__
#define __device__
#define __shared__ static
#define VECTOR_ALIGN alignas(16)
#define SHARED_BYTES(name) unsigned char *name = shim::shared_bytes()

struct Place { unsigned x, y, z; };
static Place threadIdx, blockIdx, blockDim, gridDim;

namespace shim {

[[noreturn]] inline void fail(const std::string &why) {
    fprintf(stderr, "%s\n", why.c_str());
    exit(3);
}

enum Wait { NOTHING, BLOCK, LANES, END };

// Begins on a context; from then on long jumps switch, which ask nothing of the system.
struct Fiber {
    ucontext_t context;
    jmp_buf state;
    bool is_started;
    std::vector<char> stack;
    Wait wait;
};

static std::vector<Fiber> fibers;
static jmp_buf scheduler;
static unsigned current;
static std::function<void()> body;
static std::vector<unsigned char> shared;
static std::vector<double> exchanged;

inline unsigned char *shared_bytes() {
    return (unsigned char *)(((uintptr_t)shared.data() + 15) / 16 * 16);
}

__attribute__((noinline)) inline void wait_for(Wait what) {
    fibers[current].wait = what;
    if (_setjmp(fibers[current].state) == 0) _longjmp(scheduler, 1);
}

inline void enter() {
    body();
    wait_for(END);
}

__attribute__((noinline)) inline void resume(unsigned thread) {
    current = thread;
    threadIdx = {thread, 0, 0};
    Fiber &fiber = fibers[thread];
    if (_setjmp(scheduler) != 0) return;
    if (fiber.is_started) _longjmp(fiber.state, 1);
    fiber.is_started = true;
    setcontext(&fiber.context);
}

// Lets the fibers from `first` to `end` go on, if all of them wait for `what`.
inline bool release(unsigned first, unsigned end, Wait what) {
    for (unsigned i = first; i < end; i++) {
        if (fibers[i].wait != what) return false;
    }
    for (unsigned i = first; i < end; i++) fibers[i].wait = NOTHING;
    return true;
}

inline void run_block(unsigned threads, unsigned shared_size) {
    shared.assign(shared_size + 16, 0xff);
    exchanged.assign(threads, NAN);
    if (fibers.size() < threads) fibers.resize(threads);
    for (unsigned i = 0; i < threads; i++) {
        Fiber &fiber = fibers[i];
        fiber.stack.resize(64 << 10);
        fiber.wait = NOTHING;
        fiber.is_started = false;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, enter, 0);
    }
    for (;;) {
        unsigned ended = 0;
        for (unsigned i = 0; i < threads; i++) {
            if (fibers[i].wait == NOTHING) resume(i);
            if (fibers[i].wait == END) ended++;
        }
        if (ended == threads) return;
        bool is_moving = release(0, threads, BLOCK);
        for (unsigned first = 0; first < threads; first += 32) {
            is_moving |= release(first, first + 32 < threads ? first + 32 : threads, LANES);
        }
        if (!is_moving) fail("threads wait at different barriers, or for some that have ended");
    }
}

template <class T> T exchange(unsigned mask, T value, unsigned from) {
    static_assert(sizeof(T) <= sizeof(double), "values of up to eight bytes are exchanged");
    if (mask != 0xffffffffu) fail("a shuffle leaves out lanes");
    memcpy(&exchanged[current], &value, sizeof(T));
    const unsigned own = current;
    wait_for(LANES);
    memcpy(&value, &exchanged[own / 32 * 32 + from % 32], sizeof(T));
    wait_for(LANES);
    return value;
}

// A buffer with memory around it that must stay as it is.
struct Buffer {
    static constexpr size_t MARGIN = 4096;
    std::vector<unsigned char> bytes;
    size_t size;

    unsigned char *data() { return (unsigned char *)(((uintptr_t)bytes.data() + MARGIN + 255) / 256 * 256); }

    void make(size_t length) {
        size = length;
        bytes.assign(length + 2 * MARGIN + 256, 0xa5);
    }

    void check() {
        unsigned char *begin = data(), *end = bytes.data() + bytes.size();
        for (unsigned char *at = bytes.data(); at < end; at++) {
            if ((at < begin || at >= begin + size) && *at != 0xa5) fail("a kernel has written beside a buffer");
        }
    }
};

struct Arguments {
    std::vector<unsigned char *> pointers;
    std::vector<std::pair<uint32_t, uint64_t>> scalars;
    size_t pointer = 0, scalar = 0;

    uint64_t number(uint32_t kind) {
        if (scalar >= scalars.size() || scalars[scalar].first != kind) fail("an argument is of another type");
        return scalars[scalar++].second;
    }

    template <class T> T next() {
        if constexpr (std::is_pointer_v<T>) {
            if (pointer >= pointers.size()) fail("a pointer is missing");
            return (T)pointers[pointer++];
        } else if constexpr (std::is_same_v<T, double>) {
            const uint64_t bits = number(2);
            double value;
            memcpy(&value, &bits, 8);
            return value;
        } else {
            return (T)number(sizeof(T) == 8 ? 1 : 0);
        }
    }
};

using Launcher = std::function<std::function<void()>(Arguments)>;
static std::map<std::string, Launcher> kernels;

template <class... A> void add_kernel(const char *name, void (*kernel)(A...)) {
    kernels[name] = [kernel](Arguments arguments) {
        // In braces, arguments are taken from left to right.
        std::tuple<A...> taken{arguments.next<A>()...};
        if (arguments.pointer != arguments.pointers.size() || arguments.scalar != arguments.scalars.size()) {
            fail("there are more arguments than the kernel has");
        }
        return [kernel, taken] { std::apply(kernel, taken); };
    };
}

template <class T> T read() {
    T value;
    if (fread(&value, sizeof(T), 1, stdin) != 1) fail("the request ends early");
    return value;
}

inline int serve() {
    std::vector<Buffer> buffers(read<uint32_t>());
    for (Buffer &buffer : buffers) {
        buffer.make(read<uint64_t>());
        if (buffer.size && fread(buffer.data(), buffer.size, 1, stdin) != 1) fail("the request ends early");
    }
    for (uint32_t launches = read<uint32_t>(); launches > 0; launches--) {
        std::string name(read<uint32_t>(), ' ');
        for (char &letter : name) letter = read<char>();
        gridDim = {read<uint32_t>(), 0, 0};
        gridDim.y = read<uint32_t>();
        gridDim.z = read<uint32_t>();
        blockDim = {read<uint32_t>(), 1, 1};
        const uint32_t shared_size = read<uint32_t>();
        Arguments arguments;
        for (uint32_t left = read<uint32_t>(); left > 0; left--) {
            arguments.pointers.push_back(buffers.at(read<uint32_t>()).data());
        }
        for (uint32_t left = read<uint32_t>(); left > 0; left--) {
            const uint32_t kind = read<uint32_t>();
            arguments.scalars.push_back({kind, read<uint64_t>()});
        }
        if (!kernels.count(name)) fail("there is no kernel " + name);
        body = kernels[name](arguments);
        for (blockIdx.z = 0; blockIdx.z < gridDim.z; blockIdx.z++) {
            for (blockIdx.y = 0; blockIdx.y < gridDim.y; blockIdx.y++) {
                for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++) run_block(blockDim.x, shared_size);
            }
        }
    }
    for (Buffer &buffer : buffers) {
        buffer.check();
        if (buffer.size) fwrite(buffer.data(), buffer.size, 1, stdout);
    }
    return 0;
}

}  // namespace shim

inline void __syncthreads() { shim::wait_for(shim::BLOCK); }
inline void __syncwarp() { shim::wait_for(shim::LANES); }
template <class T> T __shfl_sync(unsigned mask, T value, unsigned lane) { return shim::exchange(mask, value, lane); }
template <class T> T __shfl_xor_sync(unsigned mask, T value, unsigned step) {
    return shim::exchange(mask, value, (threadIdx.x % 32) ^ step);
}

template <class To, class From> To shim_bits(From from) {
    To to;
    static_assert(sizeof(To) == sizeof(From), "as many bits");
    memcpy(&to, &from, sizeof(To));
    return to;
}
inline float __uint_as_float(unsigned bits) { return shim_bits<float>(bits); }
inline unsigned __float_as_uint(float value) { return shim_bits<unsigned>(value); }
inline double __longlong_as_double(long long bits) { return shim_bits<double>(bits); }
