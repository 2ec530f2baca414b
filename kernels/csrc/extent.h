// The least and the greatest of 16-bit floats, lane by lane, from their bits.
//
// As signed integers the positive ones are in order and the negative ones in reverse; as unsigned integers every
// negative one is greater than every positive one. So three integer bounds, which take an instruction each on all lanes
// that fit a vector, say what two comparisons of fp32 would take widening for, and none of them loses a NaN: its bits
// are greater than those of any number.

#pragma once

#include "lanes.h"

namespace lanes {

typedef std::uint16_t H2 __attribute__((vector_size(4 * W)));  // as wide as F

template <typename T> struct Extent {  // T: vectors of std::uint16_t
    typedef decltype(T{} < T{}) Signed;
    Signed least = Signed{} + std::int16_t(0x7FFF), most = ~least;
    T farthest{};

    Extent() = default;  // of nothing
    explicit Extent(T x) : least((Signed)x), most((Signed)x), farthest(x) {}

    Extent &operator|=(const Extent &other) {
        least = other.least < least ? other.least : least;
        most = other.most > most ? other.most : most;
        farthest = other.farthest > farthest ? other.farthest : farthest;
        return *this;
    }

    // The least value: the most negative one if there is one. Never -0.
    T lowest() const {
        T low = (Signed)farthest < 0 ? farthest : (T)least;
        return low == 0x8000 ? T{} : low;
    }

    // The greatest value: the least negative one if there is no other.
    T highest() const { return (T)(most < 0 ? least : most); }
};

// The bits of the largest size that a codec takes: 2**120, or all that fp16 has.
template <bool HALF> constexpr int LARGEST = HALF ? 0x7BFF : 0x7B80;

// Whether no value between the two is too large, infinite or NaN.
template <bool HALF, typename T> inline bool sound(T lowest, T highest) {
    T low = lowest & 0x7FFF, high = highest & 0x7FFF, size = low > high ? low : high;
    std::uint16_t worst = 0;
    for (unsigned i = 0; i < sizeof size / 2; i++) worst = std::max(worst, std::uint16_t(size[i]));
    return worst <= LARGEST<HALF>;
}

// `count` values out of each of `rows` rows, which lie `from_pitch` and `to_pitch` values apart.
template <typename T>
inline void copy_rows(T *to, long to_pitch, const T *from, long from_pitch, int rows, long count) {
    for (int i = 0; i < rows; i++) std::memcpy(to + i * to_pitch, from + i * from_pitch, count * sizeof(T));
}

}  // namespace lanes
