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
// (that are asked for together), THREADS (of a block), PROMPTS (whether rows mostly have many tokens), and KIND and STATE,
// of activations and of states in memory (0:
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

__device__ __forceinline__ u32 address_of(const void *shared) {
    u64 place;
    asm("cvta.to.shared.u64 %0, %1;" : "=l"(place) : "l"(shared));
    return (u32)place;
}

template <int BYTES>
__device__ __forceinline__ void copy(u32 shared, const void *global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared), "l"(global), "n"(BYTES) : "memory");
}

static const int VECTORS = KEY_DIM / 4, HELD = VECTORS / SPLIT, GROUPS = THREADS / SPLIT, WIDTH = GROUPS * COLUMNS;
static const int LINE = 2 * VECTORS, PIECES = WIDTH * (int)sizeof(Number) / 16;

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

// Of SPLIT sums that SPLIT threads have a part of each, the whole one of the thread's own number, in over_threads' order.
__device__ __forceinline__ float own_sum(float (&parts)[SPLIT], int part) {
#pragma unroll
    for (int distance = 1, left = SPLIT / 2; distance < SPLIT; distance *= 2, left /= 2) {
        const bool is_odd = part & distance;
#pragma unroll
        for (int index = 0; index < left; index++) {
            const float given = is_odd ? parts[2 * index] : parts[2 * index + 1];
            const float kept = is_odd ? parts[2 * index + 1] : parts[2 * index];
            parts[index] = kept + __shfl_xor_sync(0xffffffffu, given, distance);
        }
    }
    return parts[0];
}

// A token goes through the state: of its `keys` and of the `query` of the one before, this thread's numbers. `told` is
// this thread's part of what that one reads.
__device__ __forceinline__ void pass(float4 (&state)[COLUMNS][HELD], const float4 (&keys)[HELD], const float4 (&query)[HELD],
                                     const Number *values, float2 rate, float (&told)[COLUMNS]) {
    float known[COLUMNS];
#pragma unroll
    for (int column = 0; column < COLUMNS; column++) {
        Sum of_key;
#pragma unroll
        for (int held = 0; held < HELD; held++) of_key.add(keys[held], state[column][held]);
        known[column] = of_key.total();
    }
#pragma unroll
    for (int column = 0; column < COLUMNS; column++) {
        Sum of_query;
#pragma unroll
        for (int held = 0; held < HELD; held++) of_query.add(query[held], state[column][held]);
        told[column] = of_query.total();
    }
#pragma unroll
    for (int column = 0; column < COLUMNS; column++) {
        const float change = fmaf(-rate.x, over_threads(known[column]), widen(values[column * GROUPS])) * rate.y;
#pragma unroll
        for (int held = 0; held < HELD; held++) {
            float4 &here = state[column][held];
            here.x = fmaf(keys[held].x, change, rate.x * here.x);
            here.y = fmaf(keys[held].y, change, rate.x * here.y);
            here.z = fmaf(keys[held].z, change, rate.x * here.z);
            here.w = fmaf(keys[held].w, change, rate.x * here.w);
            here = widen_state(narrow_state(here));
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    carry_on(const float4 *query_key, const Number *value, const float2 *factors, Stored *matrices, Stored *snapshots,
             const long long *key_of_value, Number *read, const long long *numbers, long long rows, long long tokens,
             long long queries, long long start) {
    // Of each token its keys, then its queries.
    __shared__ __align__(16) float4 lines[2][TOKENS][LINE];
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
    // Where a thread's first vectors of a token's keys and queries lie, and the first piece of its values.
    const int piece = thread % PIECES;
    auto line_at = [&](int token, int vector) {
        const long long unit = key_of_value[head] + (vector < VECTORS ? KEYS : 0);
        return query_key + ((of_row + token) * 2 * KEYS + unit) * VECTORS + vector % VECTORS;
    };
    const float4 *next_line = line_at(thread / LINE, thread % LINE);
    const char *next_values =
        (const char *)(value + ((of_row + thread / PIECES) * VALUES + head) * VALUE_DIM + first_column) + 16 * piece;
    const float2 *next_rates = factors + (of_row + thread) * VALUES + head;
    const u32 line_place = address_of(&lines[0][thread / LINE][thread % LINE]);
    const u32 values_place = address_of(&values[0][thread / PIECES][0]) + 16 * piece, rates_place = address_of(&rates[0][thread]);
    Number *output = read + ((place + kept) * VALUES + head) * VALUE_DIM + first_column + group;

    auto fetch = [&](int from, int buffer) {
        const int there = min(TOKENS, count - from);
        if constexpr (THREADS % LINE == 0) {
#pragma unroll
            for (int token = 0; token < TOKENS; token += THREADS / LINE)
                if (token + thread / LINE < there)
                    copy<16>(line_place + (buffer * TOKENS + token) * (16 * LINE), next_line + token * (2 * KEYS * VECTORS));
        } else {
            for (int index = thread; index < there * LINE; index += THREADS)
                copy<16>(address_of(&lines[buffer][index / LINE][index % LINE]), line_at(from + index / LINE, index % LINE));
        }
#pragma unroll
        for (int token = 0; token < TOKENS; token += THREADS / PIECES)
            if (token + thread / PIECES < there)
                copy<16>(values_place + (buffer * TOKENS + token) * (16 * PIECES),
                         next_values + token * (VALUES * VALUE_DIM * (int)sizeof(Number)));
        if (thread < there) copy<8>(rates_place + buffer * TOKENS * 8, next_rates);
        next_line += TOKENS * (2 * KEYS * VECTORS);
        next_values += TOKENS * (VALUES * VALUE_DIM * (int)sizeof(Number));
        next_rates += TOKENS * VALUES;
        asm volatile("cp.async.commit_group;" ::: "memory");
    };

    float4 state[COLUMNS][HELD], query[HELD];
    if (leads)
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
    auto answer = [&](int token, int column, float sum) {
        output[(long long)token * (VALUES * VALUE_DIM) + column * GROUPS] = narrow(sum);
    };
    auto load = [&](float4 (&own)[HELD], const float4 *from) {
#pragma unroll
        for (int held = 0; held < HELD; held++) own[held] = from[held * SPLIT + part];
    };
    if (saved == 0) keep(snapshots + snapshot);
#pragma unroll
    for (int held = 0; held < HELD; held++) query[held] = make_float4(0.f, 0.f, 0.f, 0.f);

    for (int from = 0, buffer = 0; from < count; from += TOKENS, buffer ^= 1) {
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncthreads();  // these tokens are there, and nobody reads those before any more
        fetch(from + TOKENS, buffer ^ 1);
        auto is_in = [&](int position) { return position > from && position <= from + TOKENS; };
        // Nothing is kept between these: what they read is added up together, a token's by each thread of a column. That
        // takes more registers, which leave room for fewer blocks of rows with few tokens.
        if (PROMPTS && TOKENS == SPLIT && count - from >= TOKENS && !is_in(settled) && !is_in(saved)) {
            float told[COLUMNS][TOKENS];
#pragma unroll
            for (int token = 0; token < TOKENS; token++) {
                float4 now[HELD];
                float sums[COLUMNS];
                load(now, lines[buffer][token]);
                pass(state, now, query, &values[buffer][token][group], rates[buffer][token], sums);
                load(query, lines[buffer][token] + VECTORS);
#pragma unroll
                for (int column = 0; column < COLUMNS; column++) told[column][token] = sums[column];
            }
#pragma unroll
            for (int column = 0; column < COLUMNS; column++) {
                const float sum = own_sum(told[column], part);
                if (from + part > fed) answer(from + part - 1, column, sum);
            }
            continue;
        }
        const int last = min(TOKENS, count - from);
        for (int token = 0; token < last; token++) {
            float4 now[HELD];
            float sums[COLUMNS];
            load(now, lines[buffer][token]);
            pass(state, now, query, &values[buffer][token][group], rates[buffer][token], sums);
            load(query, lines[buffer][token] + VECTORS);
#pragma unroll
            for (int column = 0; column < COLUMNS; column++) {
                const float sum = over_threads(sums[column]);
                if (part == 0 && from + token > fed) answer(from + token - 1, column, sum);
            }
            if (from + token + 1 == settled) keep(matrices + matrix);
            if (from + token + 1 == saved) keep(snapshots + snapshot);
        }
    }
    if (count > 0) {
#pragma unroll
        for (int column = 0; column < COLUMNS; column++) {
            Sum of_query;
#pragma unroll
            for (int held = 0; held < HELD; held++) of_query.add(query[held], state[column][held]);
            const float sum = over_threads(of_query.total());
            if (part == 0 && count > fed) answer(count - 1, column, sum);
        }
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
