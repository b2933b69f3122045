// Sums over the GPUs of one host that reach each other's memory, in the order of the ranks. See peer_all_reduce.py.
//
// Every rank has one buffer that all others can write. Data are pushed: a rank writes into the buffers of the others,
// waits, and reads its own. Every number is a float32 sum in the order of the ranks, rounded once, whatever the size of
// the message and whichever kernel made it.
//
// Given at compilation: RANKS, THREADS (of a block), SLOTS, GROUPS (8 bytes of a message each; of the largest message of
// one_shot), CHUNK (bytes of a slice in a block's part of two_shot), and where the parts of a buffer begin:
// ONE_SHOT_CALLS, TWO_SHOT_CALLS, FLAGS, ARRIVALS, INBOX, OUTBOX.
//
// Nothing here ends a wait. A rank may be late for minutes, where its host compiles or reads, and only the host knows
// whether it still lives: a process that ends takes its kernels with it.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// Additions are written in PTX, so that compiling with -ftz=true, as CuPy does, does not lose subnormal numbers.
__device__ __forceinline__ float add(float left, float right) {
    float sum;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(left), "f"(right));
    return sum;
}

// The numbers that a word of four bytes holds.

struct Float32 {
    static const int bytes = 4, in_word = 1;
    static __device__ __forceinline__ void widen(u32 word, float *values) { values[0] = __uint_as_float(word); }
    static __device__ __forceinline__ u32 round(const float *values) { return __float_as_uint(values[0]); }
};

struct Float16 {
    static const int bytes = 2, in_word = 2;
    static __device__ __forceinline__ void widen(u32 word, float *values) {
        asm("cvt.f32.f16 %0, %1;" : "=f"(values[0]) : "h"((u16)word));
        asm("cvt.f32.f16 %0, %1;" : "=f"(values[1]) : "h"((u16)(word >> 16)));
    }
    static __device__ __forceinline__ u32 round(const float *values) {
        u16 low, high;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(low) : "f"(values[0]));
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(high) : "f"(values[1]));
        return low | (u32)high << 16;
    }
};

struct Bfloat16 {
    static const int bytes = 2, in_word = 2;
    static __device__ __forceinline__ void widen(u32 word, float *values) {
        values[0] = __uint_as_float(word << 16);
        values[1] = __uint_as_float(word & 0xffff0000u);
    }
    static __device__ __forceinline__ u32 nearest(float value) {
        const u32 bits = __float_as_uint(value);
        if ((bits & 0x7fffffffu) > 0x7f800000u) return bits >> 16 | 0x40u;  // not a number: it stays one
        return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;                  // to nearest, ties to even
    }
    static __device__ __forceinline__ u32 round(const float *values) {
        return nearest(values[0]) | nearest(values[1]) << 16;
    }
};

// Let the next kernel begin, and wait until all before this one is written, where kernels begin early: elsewhere both
// are done by the time that a kernel begins. Before anything is read or written.
__device__ __forceinline__ void begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The sum of a word of every rank, in the order of the ranks.
template <class Type> __device__ __forceinline__ u32 sum_words(const u32 (&words)[RANKS]) {
    float total[Type::in_word], values[Type::in_word];
    Type::widen(words[0], total);
#pragma unroll
    for (int source = 1; source < RANKS; source++) {
        Type::widen(words[source], values);
#pragma unroll
        for (int place = 0; place < Type::in_word; place++) total[place] = add(total[place], values[place]);
    }
    return Type::round(total);
}

// Reading and writing `WORDS` words of a message, of which the last may lack some; the missing ones are zero.

template <int WORDS> struct alignas(4 * WORDS) Words {
    u32 word[WORDS];
};

template <class Type, int WORDS>
__device__ __noinline__ Words<WORDS> load_last(const char *message, long long at, long long bytes) {
    Words<WORDS> result;
    for (int index = 0; index < WORDS; index++) {
        const long long from = at + 4 * index;
        result.word[index] = 0;
        if (from + 4 <= bytes)
            result.word[index] = *(const u32 *)(message + from);
        else if (Type::bytes == 2 && from < bytes)
            result.word[index] = *(const u16 *)(message + from);
    }
    return result;
}

template <class Type, int WORDS>
__device__ __forceinline__ Words<WORDS> load(const char *message, long long at, long long bytes) {
    if (at + 4 * WORDS <= bytes) return *(const Words<WORDS> *)(message + at);
    return load_last<Type, WORDS>(message, at, bytes);
}

template <class Type, int WORDS>
__device__ __noinline__ void store_last(char *message, long long at, long long bytes, Words<WORDS> words) {
    for (int index = 0; index < WORDS; index++) {
        const long long from = at + 4 * index;
        if (from + 4 <= bytes)
            *(u32 *)(message + from) = words.word[index];
        else if (Type::bytes == 2 && from < bytes)
            *(u16 *)(message + from) = (u16)words.word[index];
    }
}

template <class Type, int WORDS>
__device__ __forceinline__ void store(char *message, long long at, long long bytes, const Words<WORDS> &words) {
    if (at + 4 * WORDS <= bytes)
        *(Words<WORDS> *)(message + at) = words;
    else
        store_last<Type, WORDS>(message, at, bytes, words);
}

// The buffers of the other ranks, beginning with the next one and ending with the one before.
struct Others {
    char *buffer[RANKS > 1 ? RANKS - 1 : 1];
};

// one_shot: every rank sends its whole message to all others, and sums all messages.
//
// Four bytes of the message and the number of the call (`mark`) travel as one 64-bit word, which is written and read
// as a whole. So a word that has this call's mark has this call's data: there is nothing to order, no fence and no
// flag. (The idea is that of NCCL's LL protocol.)
//
// Block b always works on the same groups, so it counts its calls alone. A word's place is written again SLOTS = 4 calls
// later. By then it has been read: a rank that begins call n + 2 of a block has finished n + 1, for which it had words
// that the others sent in their own call n + 1, so after their call n, and with it all reading, had ended. Two slots
// would do; the other two are free for clearing.

struct Marked {
    u64 first, second;  // mark in the upper half, data in the lower
};

__device__ __forceinline__ void send(char *place, const Words<2> &words, u32 mark) {
    const u64 upper = (u64)mark << 32;
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(place), "l"(upper | words.word[0]),
                 "l"(upper | words.word[1])
                 : "memory");
}

__device__ __forceinline__ Marked peek(const char *place) {
    Marked found;
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(found.first), "=l"(found.second)
                 : "l"(place)
                 : "memory");
    return found;
}

__device__ __forceinline__ long long arrival(u32 call, int source, int group) {
    return ARRIVALS + (((long long)(call % SLOTS) * RANKS + source) * GROUPS + group) * 16;
}

template <class Type>
__device__ __forceinline__ void one_shot(char *message, long long bytes, int rank, char *own, const Others &others) {
    u32 *const calls = (u32 *)(own + ONE_SHOT_CALLS) + blockIdx.x;
    const u32 call = *calls;
    const u32 mark = call | 0x80000000u;  // never zero, which is what a cleared word has
    const int group = blockIdx.x * THREADS + threadIdx.x;
    const long long at = (long long)group * 8;
    if (at < bytes) {
        const Words<2> mine = load<Type, 2>(message, at, bytes);
#pragma unroll
        for (int other = 0; other < RANKS - 1; other++)
            send(others.buffer[other] + arrival(call, rank, group), mine, mark);
        u32 first[RANKS], second[RANKS];
        bool is_complete;
        do {
            is_complete = true;
#pragma unroll
            for (int source = 0; source < RANKS; source++) {
                if (source == rank) {
                    first[source] = mine.word[0], second[source] = mine.word[1];
                } else {
                    const Marked found = peek(own + arrival(call, source, group));
                    first[source] = (u32)found.first, second[source] = (u32)found.second;
                    is_complete &= (u32)(found.first >> 32) == mark && (u32)(found.second >> 32) == mark;
                }
            }
        } while (!is_complete);
        Words<2> sums;
        sums.word[0] = sum_words<Type>(first), sums.word[1] = sum_words<Type>(second);
        store<Type, 2>(message, at, bytes, sums);
    }
    // Marks repeat after 2^31 calls. So that none from then is taken for one of now, where a word is rarely used, every
    // 2^24 calls the slots are cleared, one a call: the one after the next call's, into which nobody writes yet.
    if ((call & 0xffffffu) < SLOTS) {
        const Words<2> zero = {};
#pragma unroll
        for (int source = 0; source < RANKS; source++) send(own + arrival(call + 2, source, group), zero, 0);
    }
    __syncthreads();  // all have read the number of the call
    if (threadIdx.x == 0) *calls = call + 1;
}

// two_shot: rank r sums slice r of a piece of the message and sends the sums to all others.
//
// Block b of one rank works with block b of the others and with no other block, in its own part of the inbox (slices to
// sum), of the outbox (sums of the others) and of the flags. A flag holds the number of the turn; it is released after
// the data and acquired before they are read. Each part is there once, as the two waits of a turn guard both: who has
// seen a rank's flag of the outbox knows that this rank has read its inbox, and who has seen its next flag of the
// inbox, that it has read its outbox.

__device__ __forceinline__ u32 *flag_of(char *buffer, int phase, int source) {
    return (u32 *)(buffer + FLAGS) + (blockIdx.x * 2 + phase) * 16 + source;
}

// Tell all others that what this block has sent them is there, and wait until theirs is here.
__device__ __forceinline__ void meet(char *own, const Others &others, int rank, int phase, u32 turn) {
    __syncthreads();  // before it lie all that the block has written, and all that it has read
#pragma unroll
    for (int other = 0; other < RANKS - 1; other++)
        if (threadIdx.x == other)
            asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag_of(others.buffer[other], phase, rank)),
                         "r"(turn)
                         : "memory");
    if (threadIdx.x < RANKS && threadIdx.x != rank) {
        const u32 *const flag = flag_of(own, phase, threadIdx.x);
        u32 found;
        do asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(found) : "l"(flag) : "memory");
        while (found != turn);
    }
    __syncthreads();
}

__device__ __forceinline__ Words<4> receive(const char *place) {
    Words<4> words;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.word[0]), "=r"(words.word[1]), "=r"(words.word[2]), "=r"(words.word[3])
                 : "l"(place)
                 : "memory");
    return words;
}

__device__ __forceinline__ long long part_of(int source, int offset) {
    return ((long long)blockIdx.x * RANKS + source) * CHUNK + offset;
}

// `chunk`: bytes of a slice in one turn of a block; a multiple of 16, CHUNK at most.
template <class Type>
__device__ __forceinline__ void two_shot(char *message, long long bytes, int chunk, int rank, char *own,
                                         const Others &others) {
    u32 *const turns = (u32 *)(own + TWO_SHOT_CALLS) + blockIdx.x;
    u32 turn = *turns;
    const long long piece = (long long)RANKS * chunk;
    for (long long start = blockIdx.x * piece; start < bytes; start += gridDim.x * piece) {
        turn++;
#pragma unroll
        for (int other = 0; other < RANKS - 1; other++) {
            const long long slice = start + (long long)((rank + 1 + other) % RANKS) * chunk;
#pragma unroll 4
            for (int offset = threadIdx.x * 16; offset < chunk; offset += THREADS * 16)
                if (slice + offset < bytes)
                    *(Words<4> *)(others.buffer[other] + INBOX + part_of(rank, offset)) =
                        load<Type, 4>(message, slice + offset, bytes);
        }
        meet(own, others, rank, 0, turn);
        const long long slice = start + (long long)rank * chunk;
#pragma unroll 2
        for (int offset = threadIdx.x * 16; offset < chunk; offset += THREADS * 16) {
            if (slice + offset >= bytes) break;
            Words<4> given[RANKS], sums;
#pragma unroll
            for (int source = 0; source < RANKS; source++)
                given[source] = source == rank ? load<Type, 4>(message, slice + offset, bytes)
                                               : receive(own + INBOX + part_of(source, offset));
#pragma unroll
            for (int index = 0; index < 4; index++) {
                u32 words[RANKS];
#pragma unroll
                for (int source = 0; source < RANKS; source++) words[source] = given[source].word[index];
                sums.word[index] = sum_words<Type>(words);
            }
#pragma unroll
            for (int other = 0; other < RANKS - 1; other++)
                *(Words<4> *)(others.buffer[other] + OUTBOX + part_of(rank, offset)) = sums;
            store<Type, 4>(message, slice + offset, bytes, sums);
        }
        meet(own, others, rank, 1, turn);
#pragma unroll
        for (int other = 0; other < RANKS - 1; other++) {
            const int source = (rank + 1 + other) % RANKS;
            const long long theirs = start + (long long)source * chunk;
#pragma unroll 4
            for (int offset = threadIdx.x * 16; offset < chunk; offset += THREADS * 16)
                if (theirs + offset < bytes)
                    store<Type, 4>(message, theirs + offset, bytes, receive(own + OUTBOX + part_of(source, offset)));
        }
    }
    __syncthreads();  // all have read the number of the turn, where there was none for this block
    if (threadIdx.x == 0) *turns = turn;
}

// `message` lies at a multiple of 16. Buffers that the group does not have are zero.
#define OTHERS_ARGUMENTS \
    char *own, char *other0, char *other1, char *other2, char *other3, char *other4, char *other5, char *other6
#define COLLECT_OTHERS                                                                 \
    char *const all[] = {other0, other1, other2, other3, other4, other5, other6};      \
    Others others;                                                                     \
    _Pragma("unroll") for (int other = 0; other < RANKS - 1; other++) others.buffer[other] = all[other];

#define KERNELS(name, Type)                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                         \
        one_shot_##name(char *message, long long bytes, long long rank, OTHERS_ARGUMENTS) {                       \
        COLLECT_OTHERS                                                                                            \
        begin();                                                                                                  \
        one_shot<Type>(message, bytes, (int)rank, own, others);                                                   \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                         \
        two_shot_##name(char *message, long long bytes, long long chunk, long long rank, OTHERS_ARGUMENTS) {      \
        COLLECT_OTHERS                                                                                            \
        begin();                                                                                                  \
        two_shot<Type>(message, bytes, (int)chunk, (int)rank, own, others);                                       \
    }

KERNELS(float32, Float32)
KERNELS(float16, Float16)
KERNELS(bfloat16, Bfloat16)
