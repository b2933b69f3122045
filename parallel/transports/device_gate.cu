// A stream waits until the host says on: see device_gate.py.
//
// A letter is one number of 32 bits with the number of the gate's opening beside it, in one word of 64 bits of pinned
// memory of the host. So a letter is there or not there, whatever order the host's writes arrive in.

typedef unsigned int u32;
typedef unsigned long long u64;

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

// Write `count` letters' numbers to `values`, sign extended, as soon as all bear `opening`; zeros where that takes longer
// than `most` nanoseconds, so that nothing ever waits here for good. One block.
extern "C" __global__ void pass_gate(const u64 *letters, long long *values, long long count, u64 opening, u64 most) {
    __shared__ int is_open;
    const u64 begun = nanoseconds();
    if (threadIdx.x == 0) is_open = 1;
    __syncthreads();
    // The last letter is looked for by one thread, which leaves the bus to others; the rest are as good as there then.
    for (int turn = 0; turn < 2; ++turn) {
        const long long first = turn ? threadIdx.x : threadIdx.x ? count : count - 1;
        for (long long at = first; at < count; at += blockDim.x) {
            u64 word = read(letters + at);
            while (word >> 32 != opening && nanoseconds() - begun < most) {
                __nanosleep(100);
                word = read(letters + at);
            }
            if (word >> 32 != opening) is_open = 0;
            values[at] = (int)(u32)word;
        }
        __syncthreads();
        if (!is_open) break;
    }
    if (!is_open)
        for (long long at = threadIdx.x; at < count; at += blockDim.x) values[at] = 0;
}
