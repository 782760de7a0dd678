#include "biomoe/config/yaml_reader.h"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/mark.h>
#include <yaml-cpp/parser.h>

#include <map>
#include <sstream>
#include <vector>

#include "biomoe/core/error.h"
#include "biomoe/core/file.h"

namespace biomoe {
namespace {

int line_of(const YAML::Mark& mark) {
  return mark.line + 1;
}

// Builds the tree from yaml-cpp's events, so that depth, size and duplicate keys are checked while the text
// is read and before anything is copied.
class TreeBuilder : public YAML::EventHandler {
 public:
  explicit TreeBuilder(const std::string& name) : name_(name) {}
  ConfigNode take_root() { return std::move(root_); }

  void OnDocumentStart(const YAML::Mark&) override {}
  void OnDocumentEnd() override {}

  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    add(make(ConfigNode::Kind::kNull, mark), anchor);
  }

  void OnAlias(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    const auto found = anchors_.find(anchor);
    if (found == anchors_.end()) {
      throw user_error("{}:{}: an alias inside the node that it names; write the value out", name_,
                       line_of(mark));
    }
    check_depth(depth(found->second), line_of(mark));
    charge(found->second, line_of(mark));
    ConfigNode copy = found->second;
    copy.origin.line = line_of(mark);
    place(std::move(copy));
  }

  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    ConfigNode node = make(ConfigNode::Kind::kScalar, mark);
    // yaml-cpp gives "?" for a plain scalar and "!" for one in quotes or a block.
    node.quoted = tag != "?" && !tag.empty();
    if (node.quoted && tag != "!" && tag != "tag:yaml.org,2002:str") refuse_tag(tag, mark);
    const bool null = value.empty() || value == "~" || value == "null" || value == "Null" || value == "NULL";
    if (!node.quoted && null) {
      node.kind = ConfigNode::Kind::kNull;
    } else {
      node.text = value;
    }
    if (!is_text(value)) {
      throw user_error("{}:{}: a NUL character in a value; remove it", name_, line_of(mark));
    }
    add(std::move(node), anchor);
  }

  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    open(ConfigNode::Kind::kList, mark, tag, anchor);
  }
  void OnSequenceEnd() override { close(); }
  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    open(ConfigNode::Kind::kMap, mark, tag, anchor);
  }
  void OnMapEnd() override { close(); }

 private:
  struct Frame {
    ConfigNode node;
    YAML::anchor_t anchor;
    bool has_key = false;
    std::string key;
    int key_line = 0;
  };

  ConfigNode make(ConfigNode::Kind kind, const YAML::Mark& mark) const {
    ConfigNode node;
    node.kind = kind;
    node.origin = {Origin::Kind::kFile, name_, line_of(mark)};
    return node;
  }

  [[noreturn]] void refuse_tag(const std::string& tag, const YAML::Mark& mark) const {
    throw user_error("{}:{}: tag {} is not used here; remove it", name_, line_of(mark), shown(tag));
  }

  static int depth(const ConfigNode& node) {
    int deepest = 0;
    for (const ConfigNode& item : node.items) deepest = std::max(deepest, depth(item));
    for (const auto& entry : node.entries) deepest = std::max(deepest, depth(entry.second));
    return deepest + (node.kind == ConfigNode::Kind::kList || node.kind == ConfigNode::Kind::kMap ? 1 : 0);
  }

  void check_depth(int more, int line) const {
    if (static_cast<int>(stack_.size()) + more > kMaxConfigDepth) {
      throw user_error("{}:{}: more than {} levels inside each other; no key of a configuration is that deep",
                       name_, line, kMaxConfigDepth);
    }
  }

  // Counts a node against the limits before it is copied or kept.
  void charge(const ConfigNode& node, int line) {
    ++nodes_;
    bytes_ += static_cast<int64_t>(node.text.size());
    if (nodes_ > kMaxConfigNodes || bytes_ > kMaxConfigTextBytes) {
      throw user_error(
          "{}:{}: more than {} values or {} bytes of text once aliases are written out; shorten it", name_,
          line, kMaxConfigNodes, kMaxConfigTextBytes);
    }
    for (const ConfigNode& item : node.items) charge(item, line);
    for (const auto& [key, child] : node.entries) {
      bytes_ += static_cast<int64_t>(key.size());
      charge(child, line);
    }
  }

  void add(ConfigNode node, YAML::anchor_t anchor) {
    charge(node, node.origin.line);
    if (anchor) remember(node, anchor);
    place(std::move(node));
  }

  void remember(const ConfigNode& node, YAML::anchor_t anchor) {
    charge(node, node.origin.line);
    anchors_[anchor] = node;
  }

  void open(ConfigNode::Kind kind, const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor) {
    if (!tag.empty() && tag != "?" && tag != "!") refuse_tag(tag, mark);
    check_depth(1, line_of(mark));
    ConfigNode node = make(kind, mark);
    charge(node, line_of(mark));
    stack_.push_back(Frame{std::move(node), anchor, false, {}, 0});
  }

  void close() {
    Frame frame = std::move(stack_.back());
    stack_.pop_back();
    if (frame.anchor) remember(frame.node, frame.anchor);
    place(std::move(frame.node));
  }

  // Puts a finished node where the text has it: the top, the next item, the next key or the value of a key.
  void place(ConfigNode node) {
    if (stack_.empty()) {
      root_ = std::move(node);
      return;
    }
    Frame& parent = stack_.back();
    if (parent.node.kind == ConfigNode::Kind::kList) {
      parent.node.items.push_back(std::move(node));
    } else if (!parent.has_key) {
      start_key(parent, node);
    } else {
      node.origin.line = parent.key_line;  // the line of "key:", also where the value starts below it
      parent.node.entries.emplace_back(std::move(parent.key), std::move(node));
      parent.key.clear();
      parent.has_key = false;
    }
  }

  void start_key(Frame& parent, const ConfigNode& node) {
    const int line = node.origin.line;
    if (node.kind != ConfigNode::Kind::kScalar || node.text.empty()) {
      throw user_error("{}:{}: a key that is not a plain name; write 'key: value'", name_, line);
    }
    if (node.text == "<<" && !node.quoted) {
      throw user_error("{}:{}: merge keys (<<) are not supported; include another file with 'defaults:'",
                       name_, line);
    }
    if (const ConfigNode* first = parent.node.find(node.text)) {
      throw user_error("{}:{}: {}: given twice (first on line {}); keep one", name_, line, shown(node.text),
                       first->origin.line);
    }
    parent.has_key = true;
    parent.key = node.text;
    parent.key_line = line;
  }

  const std::string& name_;
  std::vector<Frame> stack_;
  std::map<YAML::anchor_t, ConfigNode> anchors_;
  ConfigNode root_;
  int64_t nodes_ = 0;
  int64_t bytes_ = 0;
};

}  // namespace

ConfigNode parse_yaml(std::string_view text, const std::string& name) {
  if (text.size() > kMaxConfigBytes) {
    throw user_error("{}: {} bytes, more than the {} of a configuration; is it the right file?", name,
                     text.size(), kMaxConfigBytes);
  }
  if (!is_text(text)) throw user_error("{}: not UTF-8 text; is it the right file?", name);
  TreeBuilder builder(name);
  try {
    std::istringstream stream{std::string(text)};
    YAML::Parser parser(stream);
    if (parser.HandleNextDocument(builder)) {
      TreeBuilder second(name);
      if (parser.HandleNextDocument(second)) {
        throw user_error("{}: more than one YAML document; keep what stands before the second '---'", name);
      }
    }
  } catch (const YAML::Exception& error) {
    throw user_error("{}:{}: not valid YAML: {}; check the indentation, quotes and colons there", name,
                     std::max(1, line_of(error.mark)), error.msg);
  }
  ConfigNode root = builder.take_root();
  if (root.kind == ConfigNode::Kind::kNull) {
    root.kind = ConfigNode::Kind::kMap;
    root.origin = {Origin::Kind::kFile, name, 1};
  }
  if (root.kind != ConfigNode::Kind::kMap) {
    throw user_error("{}:{}: 'key: value' lines are expected, not a single value or a list", name,
                     root.origin.line);
  }
  return root;
}

ConfigNode read_yaml_file(const std::filesystem::path& path) {
  return parse_yaml(read_file(path, kMaxConfigBytes), path.string());
}

}  // namespace biomoe
