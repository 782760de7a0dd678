// The FASTA, FASTQ and JSON Lines files that are odd or damaged, and expected.json, which says of each what
// it holds or that it is refused.
#pragma once

#include <cstdlib>
#include <filesystem>

namespace biomoe::test {

// Those of this folder, or others in the folder that BIOMOE_FASTA_CASES names.
inline std::filesystem::path fasta_cases() {
  const char* given = std::getenv("BIOMOE_FASTA_CASES");
  return given != nullptr ? std::filesystem::path(given)
                          : std::filesystem::path(BIOMOE_TEST_DATA) / "data_cases" / "fasta";
}

}  // namespace biomoe::test
