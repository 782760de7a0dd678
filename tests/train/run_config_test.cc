#include "biomoe/train/run_config.h"

#include <gtest/gtest.h>

#include "biomoe/core/file.h"

namespace biomoe {
namespace {

TEST(RunConfig, TheReferenceInTheDocumentationIsThatOfTheKeys) {
  const std::string page = read_file(BIOMOE_SOURCE_DIR "/docs/configuration.md");
  const std::string reference = config_reference<RunConfig>();
  EXPECT_EQ(page.substr(page.find("## ")), reference)
      << "write it again: biomoe config --reference > docs/configuration.md";
}

TEST(RunConfig, PoisoningFollowsTheBuildUnlessSaid) {
#ifdef NDEBUG
  EXPECT_FALSE(resolved_poison_activations(std::nullopt));
#else
  EXPECT_TRUE(resolved_poison_activations(std::nullopt));
#endif
  EXPECT_TRUE(resolved_poison_activations(true));
  EXPECT_FALSE(resolved_poison_activations(false));
  EXPECT_EQ(RunConfig().poison_activations, std::nullopt);
}

}  // namespace
}  // namespace biomoe
