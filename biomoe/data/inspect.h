// What a sequence file holds, what training would mask in it and what is odd about it: `biomoe data inspect`.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "biomoe/data/data_config.h"
#include "biomoe/data/sequence_reader.h"
#include "biomoe/data/vocabulary.h"

namespace biomoe {

// {"records": [{"name", "length"}, ...], "bases", "symbols": {"A": count, ...}, "soft_masked" (lower-case
// letters), "degenerate" (IUPAC codes other than A C G T U, either case), "warnings": [text, ...]}. With a
// vocabulary, "degenerate" is what it takes for that, and there are "vocabulary", its name, and "unknown",
// the symbols that it has no token for. Throws user_error as read_sequences does.
nlohmann::json inspect_file(const std::string& path, const ReadOptions& options = {},
                            const Vocabulary* vocabulary = nullptr);

// The same for people, ending with a line end: at most some 60 lines, whatever the number of records.
// `policies` says what training would mask.
std::string render_inspection(const std::string& path, const nlohmann::json& inspection,
                              const DataConfig& policies = {});

}  // namespace biomoe
