// Tokens of rows go through the matrices of a gated delta net, one after the other. See delta_net.py.
//
// A column of a head's matrix lies in the registers of SPLIT neighbouring threads, each of which has some of its rows
// all the time: SPLIT decides the order of sums, and with it bits; the other numbers do not. What a token reads and what
// the next one knows are sums over the same state, which are made together.
//
// Rows that go on where the one before ends are gone through by the first of them. In memory a matrix has its columns one
// behind the other, [VALUE_DIM, KEY_DIM].
//
// Given at compilation: KEYS, VALUES (heads), KEY_DIM, VALUE_DIM, SPLIT, COLUMNS (of a group of SPLIT threads), TOKENS
// (that are asked for together), THREADS (of a block), and KIND and STATE, of activations and of states in memory (0:
// bfloat16, 1: float16, 2: float32). A narrow state is rounded behind each token, in registers, too.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#if KIND == 2
typedef float Number;
__device__ __forceinline__ float widen(Number number) { return number; }
__device__ __forceinline__ Number narrow(float value) { return value; }
#elif KIND == 1
typedef u16 Number;
__device__ __forceinline__ float widen(Number number) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(number));
    return value;
}
__device__ __forceinline__ Number narrow(float value) {
    Number number;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(number) : "f"(value));
    return number;
}
#else
typedef u16 Number;
__device__ __forceinline__ float widen(Number number) { return __uint_as_float((u32)number << 16); }
__device__ __forceinline__ Number narrow(float value) {
    Number number;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(number) : "f"(value));
    return number;
}
#endif

// Four numbers of a state, as they lie in memory.
#if STATE == 2
typedef float4 Stored;
__device__ __forceinline__ float4 widen_state(Stored stored) { return stored; }
__device__ __forceinline__ Stored narrow_state(float4 state) { return state; }
#else
typedef uint2 Stored;
#if STATE == 1
__device__ __forceinline__ u32 narrow_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ float2 widen_pair(u32 pair) {
    float2 both;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
        : "=f"(both.x), "=f"(both.y)
        : "r"(pair));
    return both;
}
#else
__device__ __forceinline__ u32 narrow_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ float2 widen_pair(u32 pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}
#endif
__device__ __forceinline__ float4 widen_state(Stored stored) {
    const float2 first = widen_pair(stored.x), last = widen_pair(stored.y);
    return make_float4(first.x, first.y, last.x, last.y);
}
__device__ __forceinline__ Stored narrow_state(float4 state) {
    return make_uint2(narrow_pair(state.x, state.y), narrow_pair(state.z, state.w));
}
#endif

// Where kernels begin early: let the next one begin; and wait until all before this one is written.
__device__ __forceinline__ void launch_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_all() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

template <int BYTES>
__device__ __forceinline__ void copy(void *shared, const void *global) {
    u64 place;
    asm("cvta.to.shared.u64 %0, %1;" : "=l"(place) : "l"(shared));
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"((u32)place), "l"(global), "n"(BYTES) : "memory");
}

static const int VECTORS = KEY_DIM / 4, HELD = VECTORS / SPLIT, GROUPS = THREADS / SPLIT, WIDTH = GROUPS * COLUMNS;
static const int PIECES = WIDTH * (int)sizeof(Number) / 16;

struct Sum {
    float4 parts;
    __device__ __forceinline__ Sum() : parts(make_float4(0.f, 0.f, 0.f, 0.f)) {}
    __device__ __forceinline__ void add(float4 a, float4 b) {
        parts.x = fmaf(a.x, b.x, parts.x);
        parts.y = fmaf(a.y, b.y, parts.y);
        parts.z = fmaf(a.z, b.z, parts.z);
        parts.w = fmaf(a.w, b.w, parts.w);
    }
    __device__ __forceinline__ float total() const { return (parts.x + parts.y) + (parts.z + parts.w); }
};

__device__ __forceinline__ float over_threads(float sum) {
#pragma unroll
    for (int distance = 1; distance < SPLIT; distance *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    carry_on(const float4 *query_key, const Number *value, const float2 *factors, Stored *matrices, Stored *snapshots,
             const long long *key_of_value, Number *read, const long long *numbers, long long rows, long long tokens,
             long long queries, long long start) {
    __shared__ __align__(16) float4 keys[2][TOKENS][VECTORS], asked[2][TOKENS][VECTORS];
    __shared__ __align__(16) Number values[2][TOKENS][WIDTH];
    __shared__ __align__(16) float2 rates[2][TOKENS];
    launch_next();
    // The kernel before waited before it let this one begin: so states, and where they are, are there already. They are
    // read past this multiprocessor's own cache.
    const int thread = threadIdx.x, part = thread % SPLIT, group = thread / SPLIT;
    const int blocks = VALUE_DIM / WIDTH, head = blockIdx.x / blocks % VALUES;
    const int first_column = blockIdx.x % blocks * WIDTH;
    const long long row = blockIdx.x / blocks / VALUES;
    auto line = [&](int which) { return __ldcg(numbers + which * rows + row); };
    const long long slot = line(0), kept = line(1), first = line(2), end = line(3), saved_at = line(5), place = line(7);
    const bool leads = line(8) == row;
    const int count = leads ? (int)(end - kept) : 0, fed = (int)(first - kept), settled = (int)(line(4) - kept);
    const int saved = leads && saved_at >= kept && saved_at <= end ? (int)(saved_at - kept) : -1;
    const long long matrix = ((slot * VALUES + head) * VALUE_DIM + first_column + group) * VECTORS + part;
    const long long snapshot =
        ((line(6) * VALUES + head) * VALUE_DIM + first_column + group) * VECTORS + part;
    const long long of_row = row * tokens;
    const float4 *key = query_key + (of_row * 2 * KEYS + KEYS + key_of_value[head]) * VECTORS;
    const Number *brought = value + (of_row * VALUES + head) * VALUE_DIM + first_column;
    const float2 *given = factors + of_row * VALUES + head;
    Number *output = read + ((place + kept) * VALUES + head) * VALUE_DIM + first_column + group;

    auto fetch = [&](int from, int buffer) {
        const int there = min(TOKENS, count - from);
        for (int index = thread; index < there * VECTORS; index += THREADS) {
            const int token = index / VECTORS, vector = index % VECTORS;
            const float4 *source = key + (long long)(from + token) * (2 * KEYS * VECTORS) + vector;
            copy<16>(&keys[buffer][token][vector], source);
            copy<16>(&asked[buffer][token][vector], source - KEYS * VECTORS);
        }
        for (int index = thread; index < there * PIECES; index += THREADS) {
            const int token = index / PIECES, piece = index % PIECES;
            const Number *source = brought + (long long)(from + token) * (VALUES * VALUE_DIM);
            copy<16>((char *)&values[buffer][token][0] + 16 * piece, (const char *)source + 16 * piece);
        }
        for (int token = thread; token < there; token += THREADS)
            copy<8>(&rates[buffer][token], given + (long long)(from + token) * VALUES);
        asm volatile("cp.async.commit_group;" ::: "memory");
    };

    float4 state[COLUMNS][HELD], query[HELD];
#pragma unroll
    for (int column = 0; column < COLUMNS; column++)
#pragma unroll
        for (int held = 0; held < HELD; held++)
            state[column][held] = widen_state(__ldcg(matrices + matrix + column * GROUPS * VECTORS + held * SPLIT));
    wait_for_all();
    fetch(0, 0);
    auto keep = [&](Stored *where) {
#pragma unroll
        for (int column = 0; column < COLUMNS; column++)
#pragma unroll
            for (int held = 0; held < HELD; held++)
                where[column * GROUPS * VECTORS + held * SPLIT] = narrow_state(state[column][held]);
    };
    auto answer = [&](int token, const float *sums) {
        if (part == 0 && token >= fed)
#pragma unroll
            for (int column = 0; column < COLUMNS; column++)
                output[(long long)token * (VALUES * VALUE_DIM) + column * GROUPS] = narrow(sums[column]);
    };
    if (saved == 0) keep(snapshots + snapshot);
#pragma unroll
    for (int held = 0; held < HELD; held++) query[held] = make_float4(0.f, 0.f, 0.f, 0.f);

    for (int from = 0, buffer = 0; from < count; from += TOKENS, buffer ^= 1) {
        fetch(from + TOKENS, buffer ^ 1);
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        __syncthreads();
        const int last = min(TOKENS, count - from);
        for (int token = 0; token < last; token++) {
            float4 now[HELD];
            float known[COLUMNS], told[COLUMNS];
#pragma unroll
            for (int held = 0; held < HELD; held++) now[held] = keys[buffer][token][held * SPLIT + part];
            const float2 rate = rates[buffer][token];
#pragma unroll
            for (int column = 0; column < COLUMNS; column++) {
                Sum of_key, of_query;
#pragma unroll
                for (int held = 0; held < HELD; held++) {
                    of_key.add(now[held], state[column][held]);
                    of_query.add(query[held], state[column][held]);
                }
                known[column] = of_key.total(), told[column] = of_query.total();
            }
#pragma unroll
            for (int column = 0; column < COLUMNS; column++) {
                known[column] = over_threads(known[column]), told[column] = over_threads(told[column]);
                const float change = (widen(values[buffer][token][group + column * GROUPS]) - rate.x * known[column]) * rate.y;
#pragma unroll
                for (int held = 0; held < HELD; held++) {
                    float4 &here = state[column][held];
                    here.x = fmaf(now[held].x, change, rate.x * here.x);
                    here.y = fmaf(now[held].y, change, rate.x * here.y);
                    here.z = fmaf(now[held].z, change, rate.x * here.z);
                    here.w = fmaf(now[held].w, change, rate.x * here.w);
                    here = widen_state(narrow_state(here));
                }
            }
            if (from + token > 0) answer(from + token - 1, told);
#pragma unroll
            for (int held = 0; held < HELD; held++) query[held] = asked[buffer][token][held * SPLIT + part];
            if (from + token + 1 == settled) keep(matrices + matrix);
            if (from + token + 1 == saved) keep(snapshots + snapshot);
        }
        __syncthreads();
    }
    if (count > 0) {
        float told[COLUMNS];
#pragma unroll
        for (int column = 0; column < COLUMNS; column++) {
            Sum of_query;
#pragma unroll
            for (int held = 0; held < HELD; held++) of_query.add(query[held], state[column][held]);
            told[column] = over_threads(of_query.total());
        }
        answer(count - 1, told);
    }
    // Padding stands in front of a row's tokens and behind them.
    const long long begins = start + row * queries, own_first = line(9);
    const long long own_end = line(10);
    Number *padding = read + (begins * VALUES + head) * VALUE_DIM + first_column;
    for (long long at = 0; at < queries; at++) {
        if (at == place + own_first - begins) at = place + own_end - begins;
        if (at < queries && thread < WIDTH) padding[at * (VALUES * VALUE_DIM) + thread] = narrow(0.f);
    }
}
