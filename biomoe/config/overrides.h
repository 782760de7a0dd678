// `key=value` arguments of the command line -> ConfigNode.
#pragma once

#include <string>
#include <vector>

#include "biomoe/config/node.h"

namespace biomoe {

// One argument. The key is dotted names (dataset.max_seq_length); everything after the first '=' is the
// value:
//   key=            empty text
//   key=null        no value
//   key=[a, 'b,c']  a list of values
//   key='..' ".."   text, whatever is inside ('' is a quote in single quotes; \" \\ \n \t in double quotes)
//   key=anything    as written, with blanks at the ends removed; '=', ':', '#', '*' mean nothing special
// Returns a tree with that one value. Throws user_error "command line: argument: what; what to do".
ConfigNode parse_override(const std::string& argument);

// Lays every argument on `config`. Throws user_error also for a key that is given twice.
void apply_overrides(ConfigNode& config, const std::vector<std::string>& arguments);

}  // namespace biomoe
