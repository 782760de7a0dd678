#include "biomoe/data/sequence_reader.h"

#include <gtest/gtest.h>
#include <htslib/bgzf.h>
#include <unistd.h>
#include <zstd.h>

#include <filesystem>
#include <fstream>

#include "biomoe/core/error.h"
#include "biomoe/core/file.h"
#include "biomoe/data/inspect.h"
#include "biomoe/data/line_scanner.h"
#include "biomoe/data/record_parser.h"
#include "tests/fasta_cases.h"
#include "tests/unit/data/data_test_helpers.h"

namespace biomoe {
namespace {

using nlohmann::json;
using test::Collected;
using test::TempFolder;

Collected parse(std::string_view text, const ReadOptions& options = {}) {
  const auto source = memory_byte_source(text, "test");
  Collected sink;
  read_sequences(*source, options, sink);
  return sink;
}

// The message, or "" when the text was accepted; a message must be one line and name the source.
std::string refusal(std::string_view text, const ReadOptions& options = {}) {
  try {
    parse(text, options);
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kUser) << e.what();
    EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos) << e.what();
    EXPECT_EQ(std::string(e.what()).rfind("test:", 0), 0u) << e.what();
    return e.what();
  }
  return {};
}

#define EXPECT_REFUSED(text, part)                                                                     \
  do {                                                                                                 \
    const std::string message = refusal(text);                                                         \
    EXPECT_NE(message.find(part), std::string::npos) << "wanted '" << (part) << "', got: " << message; \
  } while (false)

TEST(SequenceReader, EveryCaseComesOutAsExpected) {
  const std::filesystem::path folder = test::fasta_cases();
  const json expected = json::parse(read_file(folder / "expected.json"));
  ASSERT_FALSE(expected.empty());
  for (const auto& [file, want] : expected.items()) {
    SCOPED_TRACE(file);
    const std::string path = (folder / file).string();
    if (want.contains("error")) {
      try {
        inspect_file(path);
        ADD_FAILURE() << "was accepted";
      } catch (const Error& e) {
        EXPECT_EQ(e.kind(), ErrorKind::kUser);
        EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos) << e.what();
        EXPECT_NE(std::string(e.what()).find(file), std::string::npos) << e.what();
      }
      continue;
    }
    json got;
    ASSERT_NO_THROW(got = inspect_file(path));
    for (const char* key : {"records", "bases", "symbols", "soft_masked", "degenerate"})
      EXPECT_EQ(got[key], want[key]) << key;
    const json warns = want.value("warns", json::array());
    for (const auto& record : warns) {
      bool named = false;
      for (const auto& warning : got["warnings"])
        named |= warning.get<std::string>().find(fmt::format("'{}'", record.get<std::string>())) !=
                 std::string::npos;
      EXPECT_TRUE(named) << record << " in " << got["warnings"];
    }
    EXPECT_EQ(got["warnings"].empty(), warns.empty()) << got["warnings"];
  }
}

TEST(LineScanner, EveryLineEndAndBufferSizeGivesTheSameLines) {
  const std::string text = "ab\r\ncd\ref\n\n\r\ngh\r\rlast";
  const std::vector<std::string> want{"ab", "cd", "ef", "", "", "gh", "", "last"};
  for (size_t buffer = 3; buffer < 12; ++buffer) {
    for (const std::string& prefix : {std::string(), std::string("\xef\xbb\xbf")}) {
      const std::string bytes = prefix + text;
      const auto source = memory_byte_source(bytes, "test");
      LineScanner scanner(*source, buffer);
      std::vector<std::string> lines;
      LinePiece piece;
      bool ended = true;
      while (scanner.next(piece)) {
        EXPECT_EQ(piece.starts_line, ended);
        if (piece.starts_line) lines.emplace_back();
        EXPECT_EQ(scanner.line(), static_cast<int64_t>(lines.size()));
        lines.back() += piece.text;
        ended = piece.ends_line;
      }
      EXPECT_EQ(lines, want) << buffer;
    }
  }
}

TEST(Fasta, NamesAreTheFirstWord) {
  const Collected got =
      parse(">a|b c d\nAC\n>\ttab\there\nG\n> spaced out\nT\n>caf\xc3\xa9 x\nA\n>bad\xff\nC\n>\nTT\n");
  EXPECT_EQ(got.names, (std::vector<std::string>{"a|b", "tab", "spaced", "caf\xc3\xa9", "bad?", ""}));
  EXPECT_EQ(got.sequences, (std::vector<std::string>{"AC", "G", "T", "A", "C", "TT"}));
}

TEST(Fasta, LayoutIsIgnoredAndSymbolsAreKept) {
  EXPECT_EQ(parse(">a\rACGT\rAC\r").sequences[0], "ACGTAC");
  EXPECT_EQ(parse("\xef\xbb\xbf>a\nAC GT\tAC \n").sequences[0], "ACGTAC");
  EXPECT_EQ(parse("\n\n  \n>a > b\nac-gt.N*\n\nMK").sequences[0], "ac-gt.N*MK");
  EXPECT_EQ(parse(">a\nAC\n>b").sequences, (std::vector<std::string>{"AC", ""}));
}

TEST(Fasta, ALongLineAndALongHeaderPassInPieces) {
  std::string sequence;
  for (int i = 0; i < 1'000'000; ++i) sequence += "ACGTN"[i % 5];
  const Collected got = parse(">x " + std::string(700'000, 'h') + "\n" + sequence + "\n>y\nAC");
  EXPECT_EQ(got.names, (std::vector<std::string>{"x", "y"}));
  EXPECT_EQ(got.sequences[0], sequence);
  EXPECT_REFUSED(">" + std::string(100'000, 'h') + "\nA\n", "a name of more than");
}

TEST(Fasta, ARecordMayBeLongerThanFourGigabases) {
  struct Count : SequenceSink {
    int64_t bases = 0;
    void begin_record(std::string_view) override {}
    void append(std::string_view symbols) override { bases += static_cast<int64_t>(symbols.size()); }
    void end_record() override {}
  } count;
  const auto parser = internal::fasta_parser("test", count);
  const std::string block(size_t{1} << 20, 'A');
  parser->piece({">x", true, true});
  parser->piece({block, true, false});
  for (int i = 0; i < 4100; ++i) parser->piece({block, false, false});
  parser->piece({{}, false, true});
  parser->finish();
  EXPECT_EQ(count.bases, int64_t{4101} << 20);
}

TEST(Fasta, WhatIsNotFastaIsRefusedWithItsLine) {
  EXPECT_REFUSED("", "no sequence record");
  EXPECT_REFUSED("\n \n\r\n", "no sequence record");
  EXPECT_REFUSED("ACGT\n", "test:1: 'A' where '>'");
  EXPECT_REFUSED(" >a\nAC\n", "test:1: a '>' header");
  EXPECT_REFUSED(">", "neither a name nor a sequence");
  EXPECT_REFUSED(">\n\n>b\nAC\n", "test:3: a '>' above");
  EXPECT_REFUSED(">a\nACGT>b\nAC\n", "test:2: '>' is not a sequence symbol; a line end is missing");
  EXPECT_REFUSED(">a\nAC\n1 ACGT\n", "test:3: '1' is not a sequence symbol; remove position numbers");
  EXPECT_REFUSED(">a\nAC;GT\n", "test:2: ';' is not");
  EXPECT_REFUSED(std::string_view(">a\nAC\0GT\n", 9), "test:2: byte 0x00");
  EXPECT_REFUSED(std::string_view(">a\0b\nACGT\n", 10), "test:1: byte 0x00");
  EXPECT_REFUSED(">a\nAC\xc3\xa9\n", "test:2: byte 0xc3");
  EXPECT_REFUSED(">a\x1b[31m\nAC\n", "test:1: byte 0x1b");
  EXPECT_REFUSED(std::string_view("\xff\xfe>\0a\0", 6), "test:1: byte 0xff");
}

TEST(Fastq, QualityMayHoldAnyMarkAndSpanLines) {
  const Collected got =
      parse("@r1 x\nACGT\n+\n@@>+\n\n@r2\nAC\nGT\n+r2 y\n+@\n@+\n@e\n\n+\n\n@r3\nA\n+r3\n@");
  EXPECT_EQ(got.names, (std::vector<std::string>{"r1", "r2", "e", "r3"}));
  EXPECT_EQ(got.sequences, (std::vector<std::string>{"ACGT", "ACGT", "", "A"}));
  EXPECT_EQ(parse("@r\r\nAC\r\n+\r\nII\r\n").sequences[0], "AC");
}

TEST(Fastq, DamageIsRefusedWithItsLine) {
  EXPECT_REFUSED("@r\nACGT\n+\nII\n", "test:4: record 'r' has 2 quality values for 4 bases");
  EXPECT_REFUSED("@r\nACGT\n+\nII\n@r2\nAC\n+\nII\n", "test:4: record 'r' has 2 quality values");
  EXPECT_REFUSED("@r\nAC\n+\nIII\n", "test:4: record 'r' has 3 quality values for 2");
  EXPECT_REFUSED("@r\nAC\nGT\n+\nIIII\nI\n", "test:6: a FASTQ record starts with '@'");
  EXPECT_REFUSED("@r\nACGT\nIIII\n@s\nAC\n+\nII\n", "no '+' line before the next '@'");
  EXPECT_REFUSED("@r\nACGT\n", "no '+' line");
  EXPECT_REFUSED("@r\nACGT\n+\n", "0 quality values for 4 bases");
  EXPECT_REFUSED("@r\nACGT\n+", "0 quality values for 4 bases");
  EXPECT_REFUSED("@r", "no '+' line");
  EXPECT_REFUSED("@r\nAC\n+s\nII\n", "test:3: '+s' does not repeat the name 'r'");
  EXPECT_REFUSED("@r\nAC\n+\nI I\n", "byte 0x20 in the quality");
  EXPECT_REFUSED("@r\nAC\n+\nII\n>s\nAC\n",
                 "test:5: a FASTQ record starts with '@' at the start of the line; this starts with '>'");
}

TEST(Jsonl, ReadsTheNamedField) {
  const Collected got = parse(
      "{\"text\": \"ACGT\", \"id\": \"one more\"}\n\n  {\"name\":\"n\",\"text\":\"AC\\nGT \"}\r\n"
      "{\"text\": \"|d__Bacteria;p__x|acgt\", \"id\": 3}");
  EXPECT_EQ(got.names, (std::vector<std::string>{"one", "n", "line_4"}));
  EXPECT_EQ(got.sequences, (std::vector<std::string>{"ACGT", "ACGT", "|d__Bacteria;p__x|acgt"}));
  ReadOptions options;
  options.text_column = "seq";
  EXPECT_EQ(parse("\n{\"seq\": \"GG\"}\n", options).names[0], "line_2");
}

TEST(Jsonl, FaultsNameTheLineAndTheField) {
  EXPECT_REFUSED("{\"text\": \"A\"}\n{\"other\": \"A\"}\n", "test:2: no field \"text\"; name the field");
  EXPECT_REFUSED("{\"text\": 5}\n", "test:1: the field \"text\" is a number");
  EXPECT_REFUSED("{\"text\": null}\n", "the field \"text\" is a null");
  EXPECT_REFUSED("{\"text\": \"A\"\n", "test:1: not valid JSON");
  EXPECT_REFUSED("{\"text\": \"A\"}\n[1]\n", "test:2: a JSON object was expected");
  EXPECT_REFUSED("{\"text\": \"A\"} x\n", "test:1: not valid JSON at byte");
  EXPECT_REFUSED("{\"text\": \"A\", \"n\": 1e999}\n", "test:1: not valid JSON");
  EXPECT_REFUSED("{\"text\": \"A\xff\"}\n", "not valid JSON");
  EXPECT_REFUSED("{\"text\": \"A\\u0000\"}\n", "byte 0x00");
  EXPECT_REFUSED("{" + std::string(100'000, '[') + "\n", "not valid JSON");
}

std::string compressed_gzip(std::string_view text, const TempFolder& folder, const char* mode) {
  const std::string path = (folder.path() / "made").string();
  BGZF* file = bgzf_open(path.c_str(), mode);
  EXPECT_EQ(bgzf_write(file, text.data(), text.size()), static_cast<ssize_t>(text.size()));
  bgzf_close(file);
  return read_file(path);
}

std::string file_refusal(const std::string& path) {
  try {
    Collected sink;
    read_sequences(path, {}, sink);
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kUser);
    return e.what();
  }
  return {};
}

class CompressedFiles : public ::testing::TestWithParam<const char*> {};

TEST_P(CompressedFiles, AreReadWholeOrRefused) {
  const TempFolder folder;
  std::string text;
  uint32_t state = 1;
  for (int record = 0; record < 30; ++record) {
    text += ">r" + std::to_string(record) + "\n";
    for (int i = 0; i < 5000; ++i) text += "ACGT"[(state = state * 1664525u + 1013904223u) >> 30];
    text += "\n";
  }
  std::string packed;
  if (std::string_view(GetParam()) == "zstd") {
    packed.resize(ZSTD_compressBound(text.size()));
    packed.resize(ZSTD_compress(packed.data(), packed.size(), text.data(), text.size(), 1));
  } else {
    packed = compressed_gzip(text, folder, GetParam());
  }
  const auto write = [&](const std::string& bytes, const char* name = "x.fa") {
    const std::string path = (folder.path() / name).string();
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  };
  const Collected plain = parse(text);
  Collected got;
  read_sequences(write(packed), {}, got);
  EXPECT_EQ(got.sequences, plain.sequences);
  Collected doubled;
  read_sequences(write(packed + packed), {}, doubled);  // members, blocks and frames may follow each other
  EXPECT_EQ(doubled.names.size(), 2 * plain.names.size());
  for (const size_t cut :
       {packed.size() - 1, packed.size() - 5, packed.size() / 2, packed.size() / 3, size_t{12}, size_t{5}})
    EXPECT_NE(file_refusal(write(packed.substr(0, cut))), "") << cut;
  if (std::string_view(GetParam()) == "w") {
    EXPECT_NE(file_refusal(write(packed.substr(0, packed.size() - 28))), "");
  }
  EXPECT_NE(file_refusal(write(packed + "garbage")), "");
  std::string damaged = packed;
  damaged[damaged.size() / 2] ^= 0x55;
  if (std::string_view(GetParam()) != "zstd") {  // which has no checksum here
    EXPECT_NE(file_refusal(write(damaged)), "");
  }
}

INSTANTIATE_TEST_SUITE_P(All, CompressedFiles, ::testing::Values("w", "wg", "zstd"));

TEST(Files, AFileThatChangesWhileItIsReadIsRefused) {
  const TempFolder folder;
  const auto read_while = [&](const std::string& path, const auto& change) {
    const auto source = open_byte_source(path);
    std::string buffer(1 << 16, ' ');
    size_t got = source->read(buffer.data(), 8);
    change(path);
    while (got > 0) got = source->read(buffer.data(), buffer.size());
  };
  const std::string text = ">a\n" + std::string(1 << 20, 'A') + "\n";
  for (const std::string& path : {folder.write("a.fa", text), folder.write("b.fa", text)}) {
    EXPECT_NO_THROW(read_while(path, [](const std::string&) {}));
    const bool cut = path.ends_with("a.fa");
    const std::string message = test::error_of([&] {
      read_while(path, [&](const std::string& name) {
        if (cut) std::filesystem::resize_file(name, 1000);
        if (!cut) std::ofstream(name, std::ios::app) << "ACGT\n";
      });
    });
    EXPECT_NE(message.find("changed while it was read"), std::string::npos) << message;
  }
}

TEST(Files, CompressionIsToldByContentAndPromisedByName) {
  const TempFolder folder;
  const std::string zipped = compressed_gzip(">a\nAC\n", folder, "wg");
  const auto write = [&](const char* name, const std::string& bytes) {
    const std::string path = (folder.path() / name).string();
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  };
  Collected got;
  read_sequences(write("gz_inside.fa", zipped), {}, got);
  EXPECT_EQ(got.sequences[0], "AC");
  EXPECT_NE(file_refusal(write("plain.fa.gz", ">a\nAC\n")).find("named .gz but"), std::string::npos);
  EXPECT_NE(file_refusal(write("plain.jsonl.zst", "{\"text\":\"A\"}")).find("named .zst but"),
            std::string::npos);
  EXPECT_NE(file_refusal(write("empty.fa.gz", compressed_gzip("", folder, "wg"))).find("no sequence record"),
            std::string::npos);
  EXPECT_NE(file_refusal(write("twice.fa.gz", compressed_gzip(zipped, folder, "wg"))).find("byte 0x1f"),
            std::string::npos);
  EXPECT_NE(file_refusal(write("b.fa.bz2", "BZh91AY")).find("bzip2"), std::string::npos);
  EXPECT_NE(file_refusal(write("zero.fa", "")).find("empty (0 bytes)"), std::string::npos);
  EXPECT_NE(file_refusal(folder.path().string()).find("a directory"), std::string::npos);
  EXPECT_NE(file_refusal((folder.path() / "absent.fa").string()).find("No such file"), std::string::npos);
  const std::string locked = write("locked.fa", ">a\nAC\n");
  std::filesystem::permissions(locked, std::filesystem::perms::none);
  if (geteuid() != 0) {
    EXPECT_NE(file_refusal(locked).find("Permission denied"), std::string::npos);
  }
}

}  // namespace
}  // namespace biomoe
