// The fp8 codec for CPUs: the same bytes as kernels/fp8_reference.py, which says what the steps mean.
//
// A group of K lies across its rows, one channel to a lane; a vector of V lies along its row. See lanes.h for how this
// must be compiled.

#include "extent.h"

namespace {

using namespace lanes;

constexpr int GROUP = 128, RUN = 32;  // tokens of K
constexpr int COLUMNS = 32;           // channels of K looked at together: a line of the cache per token
constexpr int LEAST_EXPONENT = 32, MOST_EXPONENT = 250, BIAS = 135;

// The bytes of scales for what reaches so far.
inline I exponents(F reach) {
    return least(most((bits(reach) + 0x1FFFFF) >> 23, I{} + LEAST_EXPONENT), I{} + 255);
}

// The nearest e4m3 numbers to x * 2**-7, which is at most 448 in size.
//
// Adding 2**20 times its power of two to a size, or 2**20 times that of the least normal number to a smaller one,
// leaves the nearest count of e4m3's steps in the last bits: 8..16 eighths of the power of two, or 0..8 of the
// subnormals' step. The count plus eight times the exponent is the code, but for a constant, which 2**7 makes a
// multiple of 2**8.
inline B to_e4m3(F x) {
    I size = bits(x) & 0x7FFFFFFF;
    I power = most(size, I{} + 0x40000000) & 0x7F800000;
    I count = bits(floats(size) + floats(power + (20 << 23)));
    return bytes(((count + (power >> 20)) & 0x7F) | ((bits(x) >> 24) & 0x80));
}

constexpr int SHIFT = 7;  // what to_e4m3 wants its numbers scaled by

// The numbers of e4m3 codes. Those of NaN, which no encoder writes, give +0.
inline F from_e4m3(B codes) {
    I code = wide(codes);
    I size = (code & 0x7F) << 20;
    F number = floats(size) * 0x1p120f;  // rebiases the exponent, subnormal numbers included
    I real = size < 0x07F00000;
    return floats((bits(number) | (code & 0x80) << 24) & real);
}

// COLUMNS channels of those tokens of one group of K that are in the block: `count`, the first of them `lead` behind
// the first of the group. Tokens lie `n` apart, rows of codes `pitch`.
template <bool HALF>
bool quantise_group(const std::uint16_t *k, long n, int lead, int count, std::uint16_t *zeros, std::uint8_t *exponent,
                    std::uint8_t *codes, long pitch) {
    alignas(ALIGNMENT) std::uint16_t x[GROUP][COLUMNS];
    alignas(ALIGNMENT) std::uint16_t run_low[GROUP / RUN][COLUMNS], run_high[GROUP / RUN][COLUMNS];
    bool fine = true;
    int runs = 0;
    for (int from = 0; from < count; runs++) {
        int to = std::min(count, (lead + from) / RUN * RUN + RUN - lead);
        for (int c = 0; c < COLUMNS; c += 2 * W) {
            Extent<H2> extent(load<H2>(k + from * n + c));
            for (int i = from; i < to; i++) {
                H2 values = load<H2>(k + i * n + c);
                extent |= Extent<H2>(values);
                store(x[i] + c, values);
            }
            H2 lowest = extent.lowest(), highest = extent.highest();
            fine &= sound<HALF>(lowest, highest);
            store(run_low[runs] + c, lowest);
            store(run_high[runs] + c, highest);
        }
        from = to;
    }
    for (int c = 0; c < COLUMNS; c += W) {
        F low = widen<HALF>(load<H>(run_low[0] + c)), high = widen<HALF>(load<H>(run_high[0] + c));
        F inner_low = low, inner_high = high;
        for (int run = 1; run < runs; run++) {
            F run_lowest = widen<HALF>(load<H>(run_low[run] + c));
            F run_highest = widen<HALF>(load<H>(run_high[run] + c));
            low = least(low, run_lowest);
            high = most(high, run_highest);
            inner_low = most(inner_low, run_lowest);
            inner_high = least(inner_high, run_highest);
        }
        H zero16 = narrow<HALF>((inner_low + inner_high) * 0.5f);
        zero16 = zero16 == 0x8000 ? H{} : zero16;
        F zero = widen<HALF>(zero16);
        I own = exponents(most(high - zero, zero - low));
        F factor = power_of_two(BIAS + SHIFT - own);
        store(zeros + c, zero16);
        store(exponent + c, bytes(own));
        for (int i = 0; i < count; i++)
            store(codes + i * pitch + c, to_e4m3((widen<HALF>(load<H>(x[i] + c)) - zero) * factor));
    }
    return fine;
}

template <bool HALF>
bool dequantise_group(const std::uint16_t *zeros, const std::uint8_t *exponent, const std::uint8_t *codes, long pitch,
                      int count, std::uint16_t *k, long n) {
    bool fine = true;
    for (int c = 0; c < COLUMNS; c += W) {
        H zero16 = load<H>(zeros + c);
        I own = wide(load<B>(exponent + c));
        I bad = (wide(zero16 & 0x7FFF) > LARGEST<HALF>) | (own < LEAST_EXPONENT) | (own > MOST_EXPONENT);
        fine &= largest(bad & 1) == 0;
        F zero = widen<HALF>(zero16), factor = power_of_two(own - BIAS);
        for (int i = 0; i < count; i++)
            store(k + i * n + c, narrow<HALF>(from_e4m3(load<B>(codes + i * pitch + c)) * factor + zero));
    }
    return fine;
}

// Part of a group of K whose channels are fewer than COLUMNS, in memory where there are as many.
struct Filled {
    std::uint16_t k[GROUP][COLUMNS]{}, zeros[COLUMNS]{};
    std::uint8_t exponents[COLUMNS], codes[GROUP][COLUMNS]{};
    Filled() { std::memset(exponents, BIAS, sizeof exponents); }
};

template <bool HALF>
bool quantise_vector(const std::uint16_t *v, int head_dim, std::uint8_t *exponent, std::uint8_t *codes) {
    const int whole_lanes = head_dim / W * W, rest = head_dim % W;
    H size{};
    for (int c = 0; c < whole_lanes; c += W) {
        H next = load<H>(v + c) & 0x7FFF;
        size = next > size ? next : size;
    }
    if (rest) {
        H next = load_some<H>(v + whole_lanes, rest) & 0x7FFF;
        size = next > size ? next : size;
    }
    int reach = largest(wide(size));
    int own = exponents(widen<HALF>(H{} + std::uint16_t(reach)))[0];
    F factor = power_of_two(I{} + (BIAS + SHIFT - own));
    *exponent = own;
    for (int c = 0; c < whole_lanes; c += W) store(codes + c, to_e4m3(widen<HALF>(load<H>(v + c)) * factor));
    if (rest)
        store_some(codes + whole_lanes, to_e4m3(widen<HALF>(load_some<H>(v + whole_lanes, rest)) * factor), rest);
    return reach <= LARGEST<HALF>;
}

template <bool HALF>
bool dequantise_vector(int exponent, const std::uint8_t *codes, int head_dim, std::uint16_t *v) {
    const int whole_lanes = head_dim / W * W, rest = head_dim % W;
    F factor = power_of_two(I{} + (exponent - BIAS));
    for (int c = 0; c < whole_lanes; c += W) store(v + c, narrow<HALF>(from_e4m3(load<B>(codes + c)) * factor));
    if (rest) {
        B last = load_some<B>(codes + whole_lanes, rest);
        store_some(v + whole_lanes, narrow<HALF>(from_e4m3(last) * factor), rest);
    }
    return LEAST_EXPONENT <= exponent && exponent <= MOST_EXPONENT;
}

// The tokens of a block that are in one group of K.
struct Tokens {
    long first;
    int lead, count;
    Tokens(long group, long block_lead, long tokens)
        : first(std::max(0L, group * GROUP - block_lead)), lead(int(block_lead + first - group * GROUP)),
          count(int(std::min(tokens, (group + 1) * GROUP - block_lead) - first)) {}
};

}  // namespace

extern "C" {

// Each returns whether all values, or all parameters, are such as an encoder takes or writes. K is [tokens, n], its
// first token `lead` behind the first of its group; V is [rows, head_dim]; `half`: fp16, else bf16.

int fp8_quantise_keys(int half, const std::uint16_t *k, long lead, long tokens, long n, std::uint16_t *zeros,
                      std::uint8_t *exponents, std::uint8_t *codes, int threads) {
    auto quantise = half ? quantise_group<true> : quantise_group<false>;
    long groups = (lead + tokens + GROUP - 1) / GROUP, parts = (n + COLUMNS - 1) / COLUMNS;
    return each(groups * parts, threads, [=](long item) {
        long group = item / parts, column = item % parts * COLUMNS, at = group * n + column;
        Tokens own(group, lead, tokens);
        const std::uint16_t *own_k = k + own.first * n + column;
        std::uint8_t *own_codes = codes + own.first * n + column;
        if (column + COLUMNS <= n)
            return quantise(own_k, n, own.lead, own.count, zeros + at, exponents + at, own_codes, n);
        Filled filled;
        copy_rows(filled.k[0], COLUMNS, own_k, n, own.count, n - column);
        bool fine = quantise(filled.k[0], COLUMNS, own.lead, own.count, filled.zeros, filled.exponents, filled.codes[0],
                             COLUMNS);
        copy_rows(zeros + at, n, filled.zeros, COLUMNS, 1, n - column);
        copy_rows(exponents + at, n, filled.exponents, COLUMNS, 1, n - column);
        copy_rows(own_codes, n, filled.codes[0], COLUMNS, own.count, n - column);
        return fine;
    });
}

int fp8_dequantise_keys(int half, long lead, long tokens, long n, const std::uint16_t *zeros,
                        const std::uint8_t *exponents, const std::uint8_t *codes, std::uint16_t *k, int threads) {
    auto dequantise = half ? dequantise_group<true> : dequantise_group<false>;
    long groups = (lead + tokens + GROUP - 1) / GROUP, parts = (n + COLUMNS - 1) / COLUMNS;
    return each(groups * parts, threads, [=](long item) {
        long group = item / parts, column = item % parts * COLUMNS, at = group * n + column;
        Tokens own(group, lead, tokens);
        const std::uint8_t *own_codes = codes + own.first * n + column;
        std::uint16_t *own_k = k + own.first * n + column;
        if (column + COLUMNS <= n) return dequantise(zeros + at, exponents + at, own_codes, n, own.count, own_k, n);
        Filled filled;
        copy_rows(filled.zeros, COLUMNS, zeros + at, n, 1, n - column);
        copy_rows(filled.exponents, COLUMNS, exponents + at, n, 1, n - column);
        copy_rows(filled.codes[0], COLUMNS, own_codes, n, own.count, n - column);
        bool fine = dequantise(filled.zeros, filled.exponents, filled.codes[0], COLUMNS, own.count, filled.k[0],
                               COLUMNS);
        copy_rows(own_k, n, filled.k[0], COLUMNS, own.count, n - column);
        return fine;
    });
}

int fp8_quantise_values(int half, const std::uint16_t *v, long rows, int head_dim, std::uint8_t *exponents,
                        std::uint8_t *codes, int threads) {
    auto quantise = half ? quantise_vector<true> : quantise_vector<false>;
    return each(rows, threads, [=](long row) {
        return quantise(v + row * head_dim, head_dim, exponents + row, codes + row * head_dim);
    });
}

int fp8_dequantise_values(int half, long rows, int head_dim, const std::uint8_t *exponents, const std::uint8_t *codes,
                          std::uint16_t *v, int threads) {
    auto dequantise = half ? dequantise_vector<true> : dequantise_vector<false>;
    return each(rows, threads, [=](long row) {
        return dequantise(exponents[row], codes + row * head_dim, head_dim, v + row * head_dim);
    });
}
}
