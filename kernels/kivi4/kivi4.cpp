// The kivi4 codec for CPUs: the same bytes as kernels/kivi4_reference.py, which says what the steps mean.
//
// A group of K lies across its rows, one channel to a lane. A group of V lies along a row: W groups are bounded side by
// side and then coded one by one. See lanes.h for how this must be compiled.

#include "extent.h"

namespace {

using namespace lanes;

constexpr int GROUP = 32;        // tokens of K
constexpr int COLUMNS = 64;      // channels of K looked at together: two lines of the cache per token
constexpr int MOST_WIDTH = 1024;  // channels in a group of V
constexpr int USUAL_WIDTH = 32;
constexpr float SMALLEST_SCALE = 0x1p-100f;
template <bool HALF> constexpr int LARGEST_SCALE = HALF ? 0x7BFF : 0x7A80;  // 2**118

// Zero and step of one group in each lane.
struct Parameters {
    H zeros, scales;
    F zero, inverse;
};

template <bool HALF> inline Parameters parameters(H lowest, H highest) {
    F zero = widen<HALF>(lowest);
    H scales = narrow<HALF>((widen<HALF>(highest) - zero) / 15.0f);
    F scale = widen<HALF>(scales);
    I used = scale >= all(SMALLEST_SCALE);
    F inverse = floats(bits(1.0f / scale) & used);
    return {lowest, narrow<HALF>(floats(bits(scale) & used)), zero, inverse};
}

template <bool HALF> inline I code(H x, F zero, F inverse) {
    F steps = (widen<HALF>(x) - zero) * inverse;
    // Only a subnormal scale is rounded by so much that this says anything.
    if constexpr (HALF) steps = least(steps, all(15.0f));
    return nearest(steps);
}

template <bool HALF> inline B coded(H low, H high, F zero, F inverse) {
    return bytes(code<HALF>(low, zero, inverse) | code<HALF>(high, zero, inverse) << 4);
}

template <bool HALF> inline void decoded(B both, F zero, F scale, H &low, H &high) {
    I codes = wide(both);
    low = narrow<HALF>(numbers(codes & 15) * scale + zero);
    high = narrow<HALF>(numbers(codes >> 4) * scale + zero);
}

template <bool HALF> inline bool fit(H zeros, H scales) {
    H sizes = zeros & 0x7FFF;
    H bad = (H)(sizes > LARGEST<HALF>) | (H)(scales > LARGEST_SCALE<HALF>);
    return largest(wide(bad)) == 0;
}

// COLUMNS channels of one group of K. Tokens lie `n` apart, rows of codes `pitch`.
template <bool HALF>
bool quantise_group(const std::uint16_t *k, long n, std::uint16_t *zeros, std::uint16_t *scales, std::uint8_t *codes,
                    long pitch) {
    alignas(ALIGNMENT) std::uint16_t x[GROUP][COLUMNS];
    bool fine = true;
    for (int c = 0; c < COLUMNS; c += 2 * W) {
        Extent<H2> extent(load<H2>(k + c));
        for (int i = 0; i < GROUP; i++) {
            H2 values = load<H2>(k + i * n + c);
            extent |= Extent<H2>(values);
            store(x[i] + c, values);
        }
        H2 lowest = extent.lowest(), highest = extent.highest();
        fine &= sound<HALF>(lowest, highest);
        store(zeros + c, lowest);
        store(scales + c, highest);
    }
    for (int c = 0; c < COLUMNS; c += W) {
        Parameters found = parameters<HALF>(load<H>(zeros + c), load<H>(scales + c));
        store(zeros + c, found.zeros);
        store(scales + c, found.scales);
        for (int i = 0; i < GROUP / 2; i++) {
            H low = load<H>(x[i] + c), high = load<H>(x[i + GROUP / 2] + c);
            store(codes + i * pitch + c, coded<HALF>(low, high, found.zero, found.inverse));
        }
    }
    return fine;
}

template <bool HALF>
bool dequantise_group(const std::uint16_t *zeros, const std::uint16_t *scales, const std::uint8_t *codes, long pitch,
                      std::uint16_t *k, long n) {
    bool fine = true;
    for (int c = 0; c < COLUMNS; c += W) {
        H own_zeros = load<H>(zeros + c), own_scales = load<H>(scales + c);
        fine &= fit<HALF>(own_zeros, own_scales);
        F zero = widen<HALF>(own_zeros), scale = widen<HALF>(own_scales);
        for (int i = 0; i < GROUP / 2; i++) {
            H low, high;
            decoded<HALF>(load<B>(codes + i * pitch + c), zero, scale, low, high);
            store(k + i * n + c, low);
            store(k + (i + GROUP / 2) * n + c, high);
        }
    }
    return fine;
}

// A group of K whose channels are fewer than COLUMNS, in memory where there are as many.
struct Filled {
    std::uint16_t k[GROUP][COLUMNS]{}, zeros[COLUMNS]{}, scales[COLUMNS]{};
    std::uint8_t codes[GROUP / 2][COLUMNS]{};
};

// The bounds of a and of b in turns, each from half as many values as before.
inline Extent<H> in_turns(Extent<H> a, Extent<H> b) {
#if defined(__AVX512BW__)
    const Extent<H>::Signed first{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
#elif defined(__AVX2__)
    const Extent<H>::Signed first{0, 8, 1, 9, 2, 10, 3, 11};
#else
    const Extent<H>::Signed first{0, 4, 1, 5};
#endif
    auto half = [&](Extent<H>::Signed which) {
        Extent<H> result(__builtin_shuffle(a.farthest, b.farthest, which));
        result.least = __builtin_shuffle(a.least, b.least, which);
        result.most = __builtin_shuffle(a.most, b.most, which);
        return result;
    };
    Extent<H> result = half(first);
    return result |= half(first + W / 2);
}

// What bounds the rows `first`, `first + step`, ..., each in a lane; `of(row)` bounds one in all lanes together.
template <int ROWS, typename Of> inline Extent<H> side_by_side(Of of, int first = 0, int step = 1) {
    if constexpr (ROWS == 1) return of(first);
    else
        return in_turns(side_by_side<ROWS / 2>(of, first, 2 * step),
                        side_by_side<ROWS / 2>(of, first + step, 2 * step));
}

// `count` groups of V, of `width` channels each: at most W. USUAL: the width is the usual one.
template <bool HALF, bool USUAL>
bool quantise_rows(const std::uint16_t *v, int width, int count, std::uint16_t *zeros, std::uint16_t *scales,
                   std::uint8_t *codes) {
    if (USUAL) width = USUAL_WIDTH;
    const int half = (width + 1) / 2, padded = (half + W - 1) / W * W;
    // Both halves of each row, filled up with a value of it. The usual ones are looked at where they are.
    alignas(ALIGNMENT) std::uint16_t x[USUAL ? 1 : W][USUAL ? 1 : MOST_WIDTH + 2 * W];
    if (!USUAL)
        for (int i = 0; i < count; i++) {
            const std::uint16_t *row = v + long(i) * width;
            std::fill(x[i], x[i] + 2 * padded, row[0]);
            std::memcpy(x[i], row, 2 * half);
            std::memcpy(x[i] + padded, row + half, 2 * (width - half));
        }
    auto row = [&](int i) { return USUAL ? v + i * USUAL_WIDTH : x[i]; };
    Extent<H> bounds = side_by_side<W>([&](int i) {
        const std::uint16_t *values = row(std::min(i, count - 1));
        Extent<H> extent(load<H>(values));
        for (int c = W; c < 2 * padded; c += W) extent |= Extent<H>(load<H>(values + c));
        return extent;
    });
    Parameters found = parameters<HALF>(bounds.lowest(), bounds.highest());
    store_some(zeros, found.zeros, count);
    store_some(scales, found.scales, count);
    for (int i = 0; i < count; i++) {
        F zero = all(found.zero[i]), inverse = all(found.inverse[i]);
        for (int c = 0; c < half; c += W) {
            B both = coded<HALF>(load<H>(row(i) + c), load<H>(row(i) + padded + c), zero, inverse);
            store_some(codes + long(i) * half + c, both, USUAL ? W : std::min(W, half - c));
        }
        if (width % 2) codes[long(i + 1) * half - 1] &= 15;
    }
    return sound<HALF>(bounds.lowest(), bounds.highest());
}

template <bool HALF, bool USUAL>
bool dequantise_rows(const std::uint16_t *zeros, const std::uint16_t *scales, const std::uint8_t *codes, int width,
                     int count, std::uint16_t *v) {
    if (USUAL) width = USUAL_WIDTH;
    const int half = (width + 1) / 2;
    H own_zeros = load_some<H>(zeros, count), own_scales = load_some<H>(scales, count);
    F zero = widen<HALF>(own_zeros), scale = widen<HALF>(own_scales);
    for (int i = 0; i < count; i++) {
        F zero_of_row = all(zero[i]), scale_of_row = all(scale[i]);
        std::uint16_t *row = v + long(i) * width;
        for (int c = 0; c < half; c += W) {
            int some = USUAL ? W : std::min(W, half - c);
            H low, high;
            decoded<HALF>(load_some<B>(codes + long(i) * half + c, some), zero_of_row, scale_of_row, low, high);
            store_some(row + c, low, some);
            store_some(row + half + c, high, USUAL ? W : std::min(W, width - half - c));
        }
    }
    return fit<HALF>(own_zeros, own_scales);
}

}  // namespace

extern "C" {

// Each returns whether all values, or all parameters, are such as an encoder takes or writes. K is [groups, 32, n], V
// [rows, width]; `half`: fp16, else bf16.

int kivi4_quantise_keys(int half, const std::uint16_t *k, long groups, long n, std::uint16_t *zeros,
                        std::uint16_t *scales, std::uint8_t *codes, int threads) {
    auto quantise = half ? quantise_group<true> : quantise_group<false>;
    long parts = (n + COLUMNS - 1) / COLUMNS;
    return each(groups * parts, threads, [=](long item) {
        long group = item / parts, column = item % parts * COLUMNS, at = group * n + column;
        const std::uint16_t *own_k = k + group * GROUP * n + column;
        std::uint8_t *own_codes = codes + group * GROUP / 2 * n + column;
        if (column + COLUMNS <= n) return quantise(own_k, n, zeros + at, scales + at, own_codes, n);
        Filled filled;
        copy_rows(filled.k[0], COLUMNS, own_k, n, GROUP, n - column);
        bool fine = quantise(filled.k[0], COLUMNS, filled.zeros, filled.scales, filled.codes[0], COLUMNS);
        copy_rows(zeros + at, n, filled.zeros, COLUMNS, 1, n - column);
        copy_rows(scales + at, n, filled.scales, COLUMNS, 1, n - column);
        copy_rows(own_codes, n, filled.codes[0], COLUMNS, GROUP / 2, n - column);
        return fine;
    });
}

int kivi4_dequantise_keys(int half, long groups, long n, const std::uint16_t *zeros, const std::uint16_t *scales,
                          const std::uint8_t *codes, std::uint16_t *k, int threads) {
    auto dequantise = half ? dequantise_group<true> : dequantise_group<false>;
    long parts = (n + COLUMNS - 1) / COLUMNS;
    return each(groups * parts, threads, [=](long item) {
        long group = item / parts, column = item % parts * COLUMNS, at = group * n + column;
        const std::uint8_t *own_codes = codes + group * GROUP / 2 * n + column;
        std::uint16_t *own_k = k + group * GROUP * n + column;
        if (column + COLUMNS <= n) return dequantise(zeros + at, scales + at, own_codes, n, own_k, n);
        Filled filled;
        copy_rows(filled.zeros, COLUMNS, zeros + at, n, 1, n - column);
        copy_rows(filled.scales, COLUMNS, scales + at, n, 1, n - column);
        copy_rows(filled.codes[0], COLUMNS, own_codes, n, GROUP / 2, n - column);
        bool fine = dequantise(filled.zeros, filled.scales, filled.codes[0], COLUMNS, filled.k[0], COLUMNS);
        copy_rows(own_k, n, filled.k[0], COLUMNS, GROUP, n - column);
        return fine;
    });
}

int kivi4_quantise_values(int half, const std::uint16_t *v, long rows, int width, std::uint16_t *zeros,
                          std::uint16_t *scales, std::uint8_t *codes, int threads) {
    auto usual = half ? quantise_rows<true, true> : quantise_rows<false, true>;
    auto other = half ? quantise_rows<true, false> : quantise_rows<false, false>;
    auto quantise = width == USUAL_WIDTH ? usual : other;
    return each((rows + W - 1) / W, threads, [=](long item) {
        long first = item * W;
        return quantise(v + first * width, width, int(std::min<long>(W, rows - first)), zeros + first, scales + first,
                        codes + first * ((width + 1) / 2));
    });
}

int kivi4_dequantise_values(int half, long rows, int width, const std::uint16_t *zeros, const std::uint16_t *scales,
                            const std::uint8_t *codes, std::uint16_t *v, int threads) {
    auto usual = half ? dequantise_rows<true, true> : dequantise_rows<false, true>;
    auto other = half ? dequantise_rows<true, false> : dequantise_rows<false, false>;
    auto dequantise = width == USUAL_WIDTH ? usual : other;
    return each((rows + W - 1) / W, threads, [=](long item) {
        long first = item * W;
        return dequantise(zeros + first, scales + first, codes + first * ((width + 1) / 2), width,
                          int(std::min<long>(W, rows - first)), v + first * width);
    });
}
}
