// A stream waits until the host says on, or finds what it needs in a table of the host's: see device_gate.py.
//
// A letter is one number of 32 bits with the number of the gate's opening beside it, in one word of 64 bits of pinned
// memory of the host. So a letter is there or not there, whatever order the host's writes arrive in.

typedef unsigned int u32;
typedef unsigned long long u64;

#ifdef __CUDA_ARCH__  // a test runs the rest on a processor
__device__ __forceinline__ u64 read(const u64 *letter) {
    u64 word;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(word) : "l"(letter) : "memory");
    return word;
}

__device__ __forceinline__ u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}
#endif

// The number of a letter as soon as it bears `opening`; `is_there` is false where it does not before `most` nanoseconds
// have passed since `begun`.
__device__ __forceinline__ int await(const u64 *letter, u64 opening, u64 begun, u64 most, bool *is_there) {
    u64 word = read(letter);
    while (word >> 32 != opening && nanoseconds() - begun < most) {
        __nanosleep(100);
        word = read(letter);
    }
    *is_there = word >> 32 == opening;
    return (int)(u32)word;
}

// A flag in shared memory that threads may have cleared, as all of them see it before any clears it again.
__device__ __forceinline__ bool all_agree(const int *flag) {
    __syncthreads();
    const bool is_set = *(const volatile int *)flag;
    __syncthreads();
    return is_set;
}

// Write `count` letters' numbers to `values`, sign extended, as soon as all bear `opening`; whether they all do in time.
// Called by all threads of the block.
__device__ bool pass(const u64 *letters, long long *values, long long count, u64 opening, u64 begun, u64 most) {
    __shared__ int is_open;
    __syncthreads();
    if (threadIdx.x == 0) is_open = 1;
    __syncthreads();
    // The last letter is looked for by one thread, which leaves the bus to others; the rest are as good as there then.
    for (int turn = 0; turn < 2; ++turn) {
        const long long first = turn ? threadIdx.x : threadIdx.x ? count : count - 1;
        for (long long at = first; at < count; at += blockDim.x) {
            bool is_there;
            values[at] = await(letters + at, opening, begun, most, &is_there);
            if (!is_there) is_open = 0;
        }
        if (!all_agree(&is_open)) return false;
    }
    return true;
}

// What `pass` writes; zeros where it takes longer than `most` nanoseconds, so that nothing ever waits here for good.
// One block.
extern "C" __global__ void pass_gate(const u64 *letters, long long *values, long long count, u64 opening, u64 most) {
    if (pass(letters, values, count, opening, nanoseconds(), most)) return;
    for (long long at = threadIdx.x; at < count; at += blockDim.x) values[at] = 0;
}

// The numbers of a table's letters in `entries`, and how many entries and numbers of an answer there are; whether all are
// there in time. The first two letters say how many, and behind them are 3 numbers of a key and an answer for each entry.
// Called by all threads of the block.
__device__ bool load(const u64 *table, int *entries, int *num_entries, int *steps, u64 opening, u64 begun, u64 most) {
    __shared__ int is_whole;
    __syncthreads();
    if (threadIdx.x == 0) is_whole = 1;
    __syncthreads();
    bool is_there, are_steps_there;
    *num_entries = await(table, opening, begun, most, &is_there);
    *steps = await(table + 1, opening, begun, most, &are_steps_there);
    if (!is_there || !are_steps_there) is_whole = 0;
    if (!all_agree(&is_whole)) return false;
    const long long count = (long long)*num_entries * (3 + *steps);
    for (long long at = threadIdx.x; at < count; at += blockDim.x) {
        entries[at] = await(table + 2 + at, opening, begun, most, &is_there);
        if (!is_there) is_whole = 0;
    }
    return all_agree(&is_whole);
}

struct Lookup {
    const u64 *letters;          // of the opening: what `pass` hands over
    const u64 *table;            // of the opening: what is looked up
    const long long *questions;  // [rows, 3]: a name, how many numbers of an answer are wanted, a line of what follows, or -1
    const long long *counts;     // [lines]
    const long long *lines;      // [lines, line_width]: of which counts[line] numbers are there
    long long line_width;
    long long *values;           // [rows, 1 + width]: how many numbers of an answer count, and they
    int *entries;                // room for a table
    int *found;                  // [rows]
    long long rows, width, fewest_missing;
    u64 opening, most;
};

// Each row's answer is that of the first entry whose key is its name, how many numbers its line has but for the last, and
// that last one. Where rows that want an answer have none, `fewest_missing` of them or more, or where there is no table, the
// letters' numbers are waited for instead, which then hold for all rows; they may be there first. One block.
extern "C" __global__ void look_up(Lookup ask) {
    __shared__ int source, missing;  // 0: nothing came, 1: letters, 2: a table
    const u64 begun = nanoseconds();
    const long long count = ask.rows * (ask.width + 1);
    if (threadIdx.x == 0) {
        source = missing = 0;
        while (true) {
            if (read(ask.letters + count - 1) >> 32 == ask.opening) source = 1;
            else if (read(ask.table) >> 32 == ask.opening) source = 2;
            if (source || nanoseconds() - begun >= ask.most) break;
            __nanosleep(100);
        }
    }
    __syncthreads();
    int num_entries = 0, steps = 0;
    if (source == 2 && !load(ask.table, ask.entries, &num_entries, &steps, ask.opening, begun, ask.most)) num_entries = 0;
    for (long long row = threadIdx.x; row < ask.rows; row += blockDim.x) ask.found[row] = num_entries;
    __syncthreads();
    for (long long pair = threadIdx.x; pair < ask.rows * num_entries; pair += blockDim.x) {
        const long long row = pair % ask.rows, line = ask.questions[3 * row + 2];
        const int entry = (int)(pair / ask.rows), *key = ask.entries + (long long)entry * (3 + steps);
        if (line < 0 || key[0] != ask.questions[3 * row]) continue;
        const long long length = ask.counts[line];
        if (length > 0 && key[1] == length - 1 && key[2] == ask.lines[line * ask.line_width + length - 1])
            atomicMin(ask.found + row, entry);
    }
    __syncthreads();
    for (long long row = threadIdx.x; row < ask.rows; row += blockDim.x)
        if (ask.questions[3 * row + 1] > 0 && ask.found[row] == num_entries) atomicAdd(&missing, 1);
    __syncthreads();
    const bool is_settled = source == 2 && num_entries && (!missing || missing < ask.fewest_missing);
    if (!is_settled && pass(ask.letters, ask.values, count, ask.opening, begun, ask.most)) return;
    __syncthreads();
    for (long long row = threadIdx.x; row < ask.rows; row += blockDim.x) {
        const long long wanted = ask.questions[3 * row + 1], has = is_settled && ask.found[row] < num_entries;
        const long long length = has ? (wanted < steps ? wanted : steps) : 0;
        const int *answer = ask.entries + (long long)ask.found[row] * (3 + steps) + 3;
        ask.values[row * (ask.width + 1)] = length > 0 ? length : 0;
        for (long long at = 0; at < ask.width; ++at) ask.values[row * (ask.width + 1) + 1 + at] = at < length ? answer[at] : 0;
    }
}
