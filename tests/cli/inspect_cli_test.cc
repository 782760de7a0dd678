// `data inspect` on files that are odd or damaged.
#include <nlohmann/json.hpp>

#include "biomoe/core/file.h"
#include "tests/cli/cli_test_util.h"
#include "tests/fasta_cases.h"

namespace biomoe::test {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

class InspectCommand : public CliTest {};

TEST_F(InspectCommand, PrintsWhatEachCaseHoldsOrRefusesIt) {
  const std::filesystem::path folder = fasta_cases();
  const json cases = json::parse(read_file(folder / "expected.json"));
  ASSERT_FALSE(cases.empty());
  for (const auto& [name, expected] : cases.items()) {
    SCOPED_TRACE(name);
    const std::string file = (folder / name).string();
    const Outcome outcome = run({"data", "inspect", file, "--json"});
    if (expected.value("error", false)) {
      expect_error(outcome, 2, {name});
      continue;
    }
    ASSERT_EQ(outcome.status, 0) << outcome.err;
    const json got = json::parse(outcome.out);
    for (const auto& [key, value] : expected.items()) {
      if (key != "warns") {
        EXPECT_EQ(got[key], value) << key;
      }
    }
    for (const auto& record : expected.value("warns", json::array())) {
      EXPECT_THAT(got["warnings"].dump(), HasSubstr(record.get<std::string>()));
    }
    EXPECT_EQ(got["warnings"].empty(), !expected.contains("warns")) << got["warnings"];
    EXPECT_EQ(run({"data", "inspect", file}).status, 0);
  }
}

TEST_F(InspectCommand, SeveralFilesAreKeptApart) {
  const Outcome outcome =
      run({"data", "inspect", path("genome.fa"), BIOMOE_TEST_DATA "/data_cases/fasta/rna.fa", "--json"});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const json got = json::parse(outcome.out);
  EXPECT_EQ(got.size(), 2u);
  EXPECT_EQ(got[path("genome.fa")]["bases"], 20000);
}

TEST_F(InspectCommand, TheFieldOfASequenceIsNamed) {
  const std::string file = write("s.jsonl", "{\"seq\": \"ACGT\"}\n");
  expect_error(run({"data", "inspect", file}), 2, {"no field \"text\"", "--text-column"});
  const Outcome outcome = run({"data", "inspect", file, "--text-column", "seq", "--json"});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_EQ(json::parse(outcome.out)["bases"], 4);
}

TEST_F(InspectCommand, WithATokenizerItSaysWhatTrainingWouldMask) {
  const std::string file = write("p.fa", ">p\nMKFLEIPQXNNNN\n");
  const auto inspected = [&](const std::string& tokenizer) {
    const Outcome outcome = run({"data", "inspect", file, "--tokenizer", tokenizer, "--json"});
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    return json::parse(outcome.out);
  };
  const json protein = inspected("protein");
  EXPECT_EQ(protein["vocabulary"], "protein");
  EXPECT_EQ(protein["degenerate"], 1);  // X; N is asparagine
  EXPECT_EQ(protein["unknown"], 0);
  EXPECT_EQ(protein["warnings"], json::array());
  const json dna = inspected("dna");
  EXPECT_EQ(dna["unknown"], 7);  // F L E I P Q X are no IUPAC codes
  EXPECT_FALSE(dna["warnings"].empty());
  EXPECT_THAT(run({"data", "inspect", file, "--tokenizer", "dna"}).out, HasSubstr("unknown:     7 "));
  expect_error(run({"data", "inspect", file, "--tokenizer", "no_such"}), 2, {"no_such"});
}

TEST_F(InspectCommand, PathsThatAreNoFilesAreRefused) {
  expect_error(run({"data", "inspect", "no_such.fa"}), 2, {"no_such.fa", "No such file"});
  expect_error(run({"data", "inspect", "."}), 2, {"directory"});
  expect_error(run({"data", "inspect", "no_such_*.fa"}), 2, {"no_such_*.fa", "matches no file"});
  expect_error(run({"data", "inspect", std::string(5000, 'x')}), 2, {"too long"});
  expect_error(run({"data", "inspect", ""}), 2, {});
  expect_error(run({"data", "inspect", "two\nlines.fa"}), 2, {"two\\nlines.fa"});
  const std::string locked = write("locked.fa", ">a\nACGT\n");
  std::filesystem::permissions(locked, std::filesystem::perms::none);
  if (geteuid() != 0) {
    expect_error(run({"data", "inspect", locked}), 2, {"Permission denied"});
  }
}

}  // namespace
}  // namespace biomoe::test
